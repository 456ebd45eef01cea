"""CUDA kernels where the rank's dispatch mode does not look: code of torch that switches dispatch to Python off.

FSDP's `no_dispatch()` and the readers of checkpoints do so. What comes here then: operators whose only kernel would
go on to a table of functions that a build without CUDA leaves empty ("missing kernel for cuda",
ATen/native/DispatchStub.cpp), and a few that have a kernel for each device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.sim.device.cuda_api.attention import register_attention
from distsim.sim.device.streams import accelerators_of
from distsim.sim.isolation.process import current_task

__all__ = ["register_kernels"]

_HAS_KERNELS = torch.version.cuda is not None or torch.version.hip is not None
_PLAIN = frozenset(
    {"record_stream", "empty.memory_format", "empty_strided", "as_strided", "view", "_local_scalar_dense", "resize_",
     "set_.source_Storage_storage_offset", "fill_.Scalar", "zero_", "cat", "add.Tensor", "mul.Tensor", "_reshape_alias"}
)  # fmt: skip
"""Operators with a kernel for each device that such code calls."""
_FUSED = frozenset({"_fused_rms_norm", "_fused_rms_norm_backward"})
"""Where no device has a kernel for these, torch composes them of others, which take as many kernels and keep more."""


@functools.cache
def register_kernels() -> tuple[Any, ...]:
    """Once in a process. Outside a simulation a build without CUDA has no tensor that comes here; one with CUDA has
    kernels of its own, and keeps them."""
    if _HAS_KERNELS:
        return (register_attention(),)
    aten = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and _missing(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(operator, functools.partial(_as_the_mode, operator), "CUDA")
    return register_attention(), aten


def _missing(name: str) -> bool:
    """Views that torch composes of others do without."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, "CUDA"):
        return False
    if name.removeprefix("aten::") in _PLAIN | _FUSED:
        return True
    return bool(has(name, "CompositeExplicitAutograd")) and not _is_view(name)


def _is_view(name: str) -> bool:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return bool(getattr(getattr(torch.ops.aten, packet), overload or "default").is_view)


def _as_the_mode(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What the mode of the running thread says."""
    task = current_task()
    if task is None or task.dispatch_mode is None:
        raise NotSimulated(f"{operator} on CUDA tensors outside a simulated rank")
    accelerators_of(task.process)
    return task.dispatch_mode.__torch_dispatch__(operator, (), args, kwargs)
