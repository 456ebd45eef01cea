"""CUDA kernels where the rank's dispatch mode does not look: code of torch that switches dispatch to Python off.

FSDP's `no_dispatch()`, the readers and writers of checkpoints and torch's own printing do so. Every operator that has
no kernel for CUDA then comes here, and so does every one whose only kernel would go on to a table of functions that a
build without CUDA leaves empty ("missing kernel for cuda", ATen/native/DispatchStub.cpp). Views are left to torch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DispatchKey

from distsim.errors import NotSimulated
from distsim.sim.device.cuda_api.attention import register_attention
from distsim.sim.isolation.process import current_task

__all__ = ["register_kernels"]


@functools.cache
def register_kernels() -> tuple[Any, ...]:
    """Once in a process. Outside a simulation a build without CUDA has no tensor that comes here; one with CUDA has
    kernels of its own, and keeps them."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return (register_attention(),)
    every = torch.library.Library("_", "IMPL")  # noqa: TOR901 - they live as long as the process
    every.fallback(_as_the_mode, "CUDA")
    aten = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and _composite(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if not operator.is_view:
                aten.impl(operator, functools.partial(_as_the_mode, operator), "CUDA")
    return register_attention(), every, aten


def _composite(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(name, DispatchKey.CompositeExplicitAutograd) and not has(name, DispatchKey.CUDA))


def _as_the_mode(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What the mode of the running thread says."""
    task = current_task()
    if task is None or task.dispatch_mode is None:
        raise NotSimulated(f"{operator} on CUDA tensors outside a simulated rank")
    return task.dispatch_mode.__torch_dispatch__(operator, (), args, kwargs)
