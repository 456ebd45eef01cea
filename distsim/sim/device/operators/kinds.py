"""How an operator on CUDA tensors is answered: by itself, by what it is made of, or by a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey
from torch._prims.rng_prims import run_dtensor_rng_op

from distsim.errors import NotSimulated
from distsim.sim.device.operators.flex import FLEX

__all__ = ["COMPOSITE", "HIGHER", "PASSED", "PLANNED", "PYTHON", "VIEW", "classify", "kinds"]

aten = torch.ops.aten
VIEW, COMPOSITE, PASSED, PLANNED, HIGHER, PYTHON = range(6)

kinds: dict[Any, int] = {}
"""Of the operators that were met."""

_ALIASES = frozenset({aten.detach.default, aten._unsafe_view.default, aten.lift_fresh.default, aten.lift.default,
                      aten.alias.default, aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset,
                      aten.set_.source_Storage, aten.detach_.default, aten.as_strided_.default,
                      aten.squeeze_.default, aten.squeeze_.dim, aten.unsqueeze_.default, aten.t_.default,
                      aten.transpose_.default})  # fmt: skip
_REGISTERED = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def classify(func: Any) -> int:
    if not isinstance(func, torch._ops.OpOverload):
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
    return VIEW if func.is_view else PLANNED
