"""Modules of torch that a rank is the first to import: everyone's, and watched from then on."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from distsim.sim.kernel.task import current_process

__all__ = ["TorchFinder"]


class TorchFinder(importlib.abc.MetaPathFinder):
    """Sees the torch modules that a rank is the first to import."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        process = current_process()
        if process is None or not fullname.startswith("torch."):
            return None
        process.world.ticks += 1  # a sign of life
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self._state)
        return spec


class _TorchLoader(importlib.abc.Loader):
    """Loads as *real* does; then the module is watched."""

    def __init__(self, real: Any, state: Any) -> None:
        self._real = real
        self._state = state

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        with self._state.everyones():
            self._real.exec_module(module)
            if module.__name__ in self._state.shared:
                self._state.shared[module.__name__].begin(module)
            self._state.adopt([sys.modules.get(module.__name__, module)])
