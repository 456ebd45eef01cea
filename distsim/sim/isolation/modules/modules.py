"""Modules are imported once per process, as they would be in separate processes.

Shared by all processes are: the standard library, torch, distsim, what these two need, packages that are compiled,
and whatever these import. Their global state is either thread-local or swapped by `SimProcess`. Everything else, the
user's modules and the installed packages they stand on (Lightning, transformers, megatron), each process imports for
itself: their state lies in classes and globals that only an instance of their own can keep apart.
"""

from __future__ import annotations

import _frozen_importlib as bootstrap
import _frozen_importlib_external as bootstrap_external
import _imp
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import torch

from distsim.debug.records.frames import installed_here
from distsim.sim.isolation.logs import made_for_all
from distsim.sim.isolation.modules.absent import stand_in
from distsim.sim.isolation.modules.module_body import ModuleBodies
from distsim.sim.isolation.modules.module_table import SharedImports
from distsim.sim.isolation.modules.own_code import own_code
from distsim.sim.kernel.task import current_process

__all__ = ["RankModules", "decide", "import_patches", "is_own_file"]


def _with_separator(paths: set[str]) -> tuple[str, ...]:
    found = {os.path.realpath(p) for p in paths if p} | {p for p in paths if p}
    return tuple(sorted(p.rstrip(os.sep) + os.sep for p in found))


def _other_roots() -> set[str]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # distsim/
    paths.add(here)
    house = os.path.dirname(here)
    paths.update(os.path.join(house, folder) for folder in ("debug", "realexec"))
    paths.add(os.path.dirname(torch.__file__))  # built where its source is, it lies among no installed packages
    return paths


_SITE = _with_separator(set(installed_here()))
_SHARED = _with_separator({*installed_here(), *_other_roots()})
_TEST_BODIES = "torch.testing._internal.distributed"
"""torch's own tests: programs for several processes that happen to lie among torch's modules."""


def is_own_file(path: str | None) -> bool:
    """Whether *path* is source of the user's own program."""
    if not path or path.startswith("<"):
        return False
    return not path.startswith(_SHARED)


_OWN_ALL_THE_SAME = frozenset({"fsspec"})
"""Torch asks for it and does without: only its checkpoint writer of that name imports it. Others register
their file systems with it while they are imported."""

_COMPILED_SHARE = 0.01
"""A package with more extension modules than this, per Python module, is compiled (numpy has 3 in 100, pandas 4,
psutil 8): C code holds its Python classes, so that it can be there once only. Below it, the package has
a compiled helper on the side (megatron-core: 1 in 366)."""


@functools.cache
def _needed() -> frozenset[str]:
    """Top-level names of torch, of distsim and of the distributions that these require."""
    found: set[str] = set()
    names: set[str] = set()
    todo = ["torch", "torch-distsim"]
    while todo:
        name = todo.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in names:
            continue
        names.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        listed = (distribution.read_text("top_level.txt") or "").split()
        if not listed:
            tops = (str(file).partition("/")[0].removesuffix(".py") for file in distribution.files or ())
            listed = [top for top in tops if top.isidentifier()]
        found.update(listed)
        for requirement in distribution.requires or ():
            asked, _, condition = requirement.partition(";")
            if "extra" not in condition and (match := re.match(r"[\w.-]+", asked)):
                todo.append(match.group())
    return frozenset(found - _OWN_ALL_THE_SAME)


@functools.cache
def _is_compiled_namespace(folders: tuple[str, ...]) -> bool:
    """Whether a part of a package without `__init__` is compiled: google._upb knows google.protobuf's classes."""
    parts = (os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder))
    return any(os.path.isdir(part) and _is_compiled(part) for part in parts)


@functools.cache
def _is_compiled(folder: str) -> bool:
    extensions = sources = 0
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    for _, _, files in os.walk(folder):
        extensions += sum(name.endswith(suffixes) for name in files)
        sources += sum(name.endswith(".py") for name in files)
    return extensions > _COMPILED_SHARE * sources


class _OnceLoader(importlib.abc.Loader):
    """Of an extension module in a package of which each process has its own: it is there once, and becomes an
    attribute of each."""

    def __init__(self, real: importlib.machinery.ExtensionFileLoader) -> None:
        self._real = real
        self._module: ModuleType | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec) if self._module is None else self._module

    def exec_module(self, module: ModuleType) -> None:
        if self._module is None:
            self._real.exec_module(module)
            self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class RankModules:
    """Decides, module by module, which of them all processes share."""

    def __init__(self) -> None:
        self.shared = SharedImports((_TEST_BODIES,))
        self._loaded: frozenset[str] | None = None
        """What was there when the first import came: there may be none, and a thousand names."""
        self._own: dict[str, bool] = {}
        self._extensions: dict[str, _OnceLoader] = {}
        self._loading: set[int] = set()
        """Processes that run the body of a shared module."""
        self.bodies = ModuleBodies()

    def found(self, fullname: str, spec: importlib.machinery.ModuleSpec) -> None:
        """A process, or the host, is about to import *fullname*."""
        if self._loaded is None:
            self._loaded = frozenset(sys.modules)
        own = self._own.get(fullname)
        if own is None:
            own = self._own[fullname] = self._is_own(fullname, spec)
        if not own:
            self.shared.names.append(fullname)
        elif isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            spec.loader = self._extensions.setdefault(fullname, _OnceLoader(spec.loader))

    def is_shared(self, fullname: str) -> bool:
        """Whether the module that was found as *fullname* is there once for all processes."""
        return not self._own.get(fullname, True)

    @contextlib.contextmanager
    def sharing_imports(self, fullname: str, process: int) -> Iterator[None]:
        """Share what the body of shared module *fullname* enters into `sys.modules` of *process*: the installed
        packages that it imports, and modules that it puts there itself. The user's own modules are not shared."""
        if process in self._loading or not self.is_shared(fullname):
            yield
            return
        before = set(sys.modules)
        self._loading.add(process)
        try:
            yield
        finally:
            self._loading.discard(process)
            for name in [name for name in sys.modules if name not in before]:
                if self._own.get(name, True) and self._may_be_shared(name):
                    self._own[name] = False
                    self.shared.names.append(name)

    def _may_be_shared(self, name: str) -> bool:
        if name.partition(".")[0] in _OWN_ALL_THE_SAME or f"{name}.".startswith(f"{_TEST_BODIES}."):
            return False
        was_imported = name in self._own
        return not (was_imported and is_own_file(getattr(sys.modules[name], "__file__", None)))

    def _is_own(self, fullname: str, spec: importlib.machinery.ModuleSpec) -> bool:
        parent = fullname.rpartition(".")[0]
        if isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            return self._own.get(parent, False)
        if fullname in sys.builtin_module_names or _imp.is_frozen(fullname):
            return False
        folders = list(spec.submodule_search_locations or ())
        origin = spec.origin or (folders[0] if folders else None)  # a namespace package has no origin
        if is_own_file(origin) or f"{fullname}.".startswith(f"{_TEST_BODIES}."):
            return True
        if origin is not None and not origin.startswith(_SITE):
            return False
        if parent and self._decides_for_parts(parent):
            return self._own.get(parent, False)
        if fullname in (self._loaded or ()) or fullname.partition(".")[0] in _needed():
            return False
        if spec.origin is None:
            return not _is_compiled_namespace(tuple(folders))
        return not folders or not _is_compiled(folders[0])

    def _decides_for_parts(self, package: str) -> bool:
        """Whether parts of *package* are shared as it is: all but those of a package without `__init__`, each of which
        decides for itself."""
        module = sys.modules.get(package)
        if getattr(module, "__file__", None) is not None or self._own.get(package) is False:
            return True
        return package in (self._loaded or ()) and _is_compiled_namespace(tuple(getattr(module, "__path__", ())))


_deciding: list[RankModules] = []


def decide(modules: RankModules | None) -> None:
    """*modules* hears of every import from now on; None: nobody does."""
    _deciding[:] = [] if modules is None else [modules]


def import_patches() -> list[tuple[Any, str, Any]]:
    """Who decides hears of every import, whatever finder there is for it. Import locks are per process: a
    module that calls a collective while it is imported must not block the same import in another rank.
    And installed code is read once for all."""
    real_find, real_lock = bootstrap._find_spec, bootstrap._get_module_lock  # type: ignore[attr-defined]
    real_load = bootstrap._load_unlocked  # type: ignore[attr-defined]
    loader = bootstrap_external._LoaderBasics
    real_run = loader.exec_module

    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        process = current_process()
        if process is not None:
            process.world.ticks += 1
        spec = real_find(name, path, target) or stand_in(name)
        if spec is not None:
            for modules in _deciding:
                modules.found(name, spec)
        return spec

    def module_lock(name: str) -> Any:
        process = current_process()
        return real_lock(name) if process is None else real_lock(f"{name}@{process.index}")

    def load_unlocked(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        process = current_process()
        if process is None:
            return cast(ModuleType, real_load(spec))
        with _deciding[0].sharing_imports(spec.name, process.index):
            return cast(ModuleType, real_load(spec))

    def exec_module(self: Any, module: ModuleType) -> None:
        process = current_process()
        if process is None:
            real_run(self, module)
            return
        path, name = str(getattr(self, "path", "")), module.__name__
        with made_for_all(_deciding[0].is_shared(name)), process.world.core.left():  # it may make threads of its own
            if path.startswith(_SITE):
                _deciding[0].bodies.run(module, path, lambda: self.get_code(name), lambda: self.get_source(name))
            elif type(self) is importlib.machinery.SourceFileLoader and is_own_file(path):
                exec(own_code(self.get_data(path), path), module.__dict__)
            else:
                real_run(self, module)

    return [
        (bootstrap, "_find_spec", find_spec),
        (bootstrap, "_get_module_lock", module_lock),
        (bootstrap, "_load_unlocked", load_unlocked),
        (loader, "exec_module", exec_module),
    ]
