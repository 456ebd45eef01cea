"""Whether an operator is a GPU's, and how it is answered: by itself, by what it is made of, or by a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.sim.device.operators.flex import FLEX
from distsim.torch_compat.device import DISPATCH_KEY, RUN_DTENSOR_RNG_OP, OpOverload, aten

__all__ = ["COMPOSITE", "HIGHER", "PASSED", "PLANNED", "PYTHON", "VIEW", "classify", "gpu_of", "kinds", "look"]

DispatchKey = DISPATCH_KEY.get()
run_dtensor_rng_op = RUN_DTENSOR_RNG_OP.get()

VIEW, COMPOSITE, PASSED, PLANNED, HIGHER, PYTHON = range(6)

kinds: dict[Any, int] = {}
"""Of the operators that were met."""

_ALIASES = frozenset({aten.detach.default, aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default,
                      aten.alias.default})  # fmt: skip
_ANEW = frozenset({aten.resize_.default, aten.resize_as_.default, aten.set_.default})
"""They change what a tensor looks like, and may need other memory."""
_REGISTERED = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def classify(func: Any) -> int:
    if not isinstance(func, OpOverload):
        if func is run_dtensor_rng_op:
            return HIGHER
        if func in FLEX:
            return PLANNED
        raise NotSimulated(f"{func} on CUDA tensors", "write it with plain torch operators")
    if func in _ALIASES:
        return VIEW
    if func.namespace in _REGISTERED or func is aten._pack_padded_sequence.default:  # lengths are the host's
        return PASSED
    if func.namespace in ("fsdp", "c10d") and func.has_kernel_for_dispatch_key(DispatchKey.CUDA):
        return PYTHON  # what they copy, and into what, they say themselves; c10d's lead to torch's `fake` group
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd) and not func.has_kernel_for_dispatch_key(
        DispatchKey.CUDA
    ):
        return COMPOSITE  # before views: `to` may make one
    changes_looks = torch.Tag.inplace_view in func.tags and func not in _ANEW  # squeeze_, set_, as_strided_
    return VIEW if func.is_view or changes_looks else PLANNED


def gpu_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The GPU that an operator is about; None: it is the host's."""
    for value in args:
        if isinstance(value, Tensor):
            if value.is_cuda:
                return value.device
        elif type(value) is list or type(value) is tuple:
            for item in value:
                if isinstance(item, Tensor):
                    if item.is_cuda:
                        return item.device
                elif item is not None:
                    break
        elif type(value) is torch.device and value.type == "cuda":
            return value
    if kwargs:
        for value in kwargs.values():
            if isinstance(value, Tensor):
                if value.is_cuda:
                    return value.device
            elif type(value) is torch.device and value.type == "cuda":
                return value
    return None


def look(value: Any) -> Any:
    """What looks like *value*, where that is a GPU's tensor."""
    if isinstance(value, Tensor) and value.is_cuda:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value
