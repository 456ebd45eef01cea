"""User modules are imported once per process, as they would be in separate processes.

What counts as the user's: every module found outside the standard library, site-packages and
distsim itself. torch, numpy and other installed packages are shared: their global state is
either thread-local or swapped by `SimProcess`.
"""

from __future__ import annotations

import _frozen_importlib as bootstrap
import importlib.abc
import importlib.machinery
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from distsim.sim.task import current_process

__all__ = ["UserModules", "import_patches", "install_finder", "is_user_file", "remove_finder"]


def _shared_roots() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages())
    paths.add(site.getusersitepackages())
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # distsim/
    paths.add(here)
    house = os.path.dirname(here)
    paths.update(os.path.join(house, folder) for folder in ("debug", "realexec"))
    found = {os.path.realpath(p) for p in paths if p} | {p for p in paths if p}
    return tuple(sorted(p.rstrip(os.sep) + os.sep for p in found))


_SHARED = _shared_roots()
TYPED = ("<stdin>", "<console>", "<ipython-input", "<python-input")
"""What people type at a prompt is their program, too."""


def is_user_file(path: str | None) -> bool:
    """Whether *path* is source of the user's own program."""
    if not path:
        return False
    if path.startswith("<"):
        return path.startswith(TYPED)
    return not path.startswith(_SHARED)


class UserModules(importlib.abc.MetaPathFinder):
    """Notes which modules of the running process are the user's, so that they are swapped."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        process = current_process()
        if process is None:
            return None
        process.world.ticks += 1
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return None
        origin = spec.origin
        if origin is None and spec.submodule_search_locations is not None:  # a namespace package
            origin = next(iter(spec.submodule_search_locations), None)
        if is_user_file(origin) and spec.loader.__class__ is not importlib.machinery.ExtensionFileLoader:
            process.user_names[fullname] = None
        return spec


def import_patches() -> list[tuple[Any, str, Any]]:
    """Import locks are per process too: a module that calls a collective while it is imported
    must not block the same import in another rank."""
    real = bootstrap._get_module_lock  # type: ignore[attr-defined]

    def module_lock(name: str) -> Any:
        process = current_process()
        return real(name) if process is None else real(f"{name}@{process.index}")

    return [(bootstrap, "_get_module_lock", module_lock)]


def install_finder() -> UserModules:
    finder = UserModules()
    sys.meta_path.insert(0, finder)
    return finder


def remove_finder(finder: UserModules) -> None:
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
