"""CUDA kernels where the rank's dispatch mode does not look: code of torch that switches dispatch to Python off.

FSDP's `no_dispatch()` and the readers of checkpoints do so. What comes here then: operators whose only kernel would
go on to a table of functions that a build without CUDA leaves empty ("missing kernel for cuda",
ATen/native/DispatchStub.cpp), and a few that have a kernel for each device. A build with CUDA has kernels for all of
them, which look for a GPU and for data: ours stand in their place as long as a simulation runs.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.sim.device.cuda_api.attention import register_attention
from distsim.sim.device.cuda_api.ranks import Patch
from distsim.sim.device.streams import accelerators_of
from distsim.sim.isolation.process import current_task
from distsim.torch_compat.device import (
    CACHE_KEY,
    DISPATCH_CACHE_KEY,
    DISPATCH_GET_ALL_OP_NAMES,
    DISPATCH_HAS_KERNEL_FOR_DISPATCH_KEY,
    FAKE_TENSOR_MODE,
)

__all__ = ["fake_patches", "give_back_kernels", "register_kernels"]

_DispatchCacheKey = DISPATCH_CACHE_KEY.get()
_dispatch_get_all_op_names = DISPATCH_GET_ALL_OP_NAMES.get()
_dispatch_has_kernel_for_dispatch_key = DISPATCH_HAS_KERNEL_FOR_DISPATCH_KEY.get()
FakeTensorMode = FAKE_TENSOR_MODE.get()

_HAS_KERNELS = torch.version.cuda is not None or torch.version.hip is not None
_PLAIN = frozenset(
    {"record_stream", "empty.memory_format", "empty_strided", "as_strided", "view", "_local_scalar_dense", "resize_",
     "set_.source_Storage_storage_offset", "fill_.Scalar", "zero_", "cat", "add.Tensor", "mul.Tensor", "_reshape_alias"}
)  # fmt: skip
"""Operators with a kernel for each device that such code calls."""
_FUSED = frozenset({"_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward", "mish_backward"})
"""Where no device has a kernel for these, torch composes them of others, which take as many kernels and keep more."""


_registered: list[torch.library.Library] = []


def register_kernels() -> None:
    """Before the first use of a GPU."""
    if _registered:
        return
    aten = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they stand in the place of others, which is the point
        for name in _dispatch_get_all_op_names():
            if name.startswith("aten::") and _is_ours(name):
                operator = _operator(name)
                aten.impl(operator, functools.partial(_as_the_mode, operator), "CUDA")
        _registered.extend([register_attention(), aten])


def give_back_kernels() -> None:
    """After a simulation: what a build with CUDA has of its own is in force again. One without has no tensor that
    comes here, and keeps ours, which take a quarter of a second."""
    if _HAS_KERNELS:
        while _registered:
            _registered.pop()._destroy()


def _is_ours(name: str) -> bool:
    """Views that torch composes of others do without."""
    has = _dispatch_has_kernel_for_dispatch_key
    if has(name, "CUDA"):
        return _HAS_KERNELS
    if name.removeprefix("aten::") in _PLAIN | _FUSED:
        return True
    return bool(has(name, "CompositeExplicitAutograd")) and not _operator(name).is_view


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _as_the_mode(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What the mode of the running thread says."""
    task = current_task()
    if task is None or task.dispatch_mode is None:
        raise NotSimulated(f"{operator} on CUDA tensors outside a simulated rank")
    accelerators_of(task.process)
    return task.dispatch_mode.__torch_dispatch__(operator, (), args, kwargs)


def fake_patches() -> list[Patch]:
    """(holder, attribute, replacement) of what fake tensors are remembered by: torch does so for the whole process, and
    "cuda" without a number is the current GPU, which each process has its own of."""
    real: Any = CACHE_KEY.get()

    def key(self: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        found = real(self, state, func, args, kwargs)
        task = current_task()
        if task is None or not task.cuda_device:
            return found
        return _DispatchCacheKey((*found.key, task.cuda_device))

    return CACHE_KEY.replaced_by(key)
