"""Fake tensors (torch._subclasses) of ranks whose current GPUs differ.

torch remembers for the whole process what an operator makes of fake tensors; "cuda" without a number is the current GPU
then, which each process has its own of.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode, _DispatchCacheKey

from distsim.sim.device.cuda_api.ranks import Patch
from distsim.sim.isolation.process import current_task

__all__ = ["fake_patches"]


def fake_patches() -> list[Patch]:
    """(holder, attribute, replacement) of what fake tensors are remembered by."""
    real: Any = FakeTensorMode._cache_key

    def key(self: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        found = real(self, state, func, args, kwargs)
        task = current_task()
        if task is None or not task.cuda_device:
            return found
        return _DispatchCacheKey((*found.key, task.cuda_device))

    return [(FakeTensorMode, "_cache_key", key)]
