"""Device meshes: each its rank's own, and what torch keeps by mesh."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from distsim.sim.kernel.task import current_process
from distsim.torch_compat.state import RANK_KEYED

__all__ = ["follow", "forget_meshes", "mesh_patches"]


def _owner() -> int | None:
    process = current_process()
    return None if process is None else process.index


def mesh_patches() -> list[tuple[Any, str, Any]]:
    """A mesh is its rank's own. torch's caches take meshes of equal shape for one, though what they
    keep holds for one coordinate; `_thread_id` is what torch itself tells the meshes of threads apart by."""
    real_init, real_get, real_set = DeviceMesh.__init__, DeviceMesh.__getstate__, DeviceMesh.__setstate__

    @functools.wraps(real_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self._thread_id, self._hash = _owner(), None

    @functools.wraps(real_get)
    def get_state(self: Any) -> dict[str, Any]:
        return {**real_get(self), "_thread_id": None, "_hash": None}

    @functools.wraps(real_set)
    def set_state(self: Any, state: dict[str, Any]) -> None:
        real_set(self, {**state, "_thread_id": _owner(), "_hash": None})

    named: list[tuple[str, Callable[..., Any]]] = [
        ("__init__", init),
        ("__getstate__", get_state),
        ("__setstate__", set_state),
    ]
    return [(DeviceMesh, name, function) for name, function in named]


def forget_meshes() -> None:
    """The caches by mesh would keep the ranks of a simulation that is over."""
    for name, path in RANK_KEYED:
        module = sys.modules.get(name)
        cache = None if module is None else follow(module, path)
        clear = getattr(cache, "cache_clear", None) or getattr(cache, "clear", None)
        if clear is not None:
            clear()


def follow(module: ModuleType, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
