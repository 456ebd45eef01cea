"""Which allocations are parameters, gradients, an optimizer's state, buffers of collectives."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distsim.sim.device.allocator.ledger import ACTIVATIONS, COMMUNICATION, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, Tag

__all__ = ["claim_all", "claim_buffers", "claim_of_optimizer", "tag_of"]


def tag_of(tensor: Tensor) -> Tag | None:
    """Of the memory that *tensor* (a DTensor's: its local part) lies in; None: not a simulated GPU's."""
    local = getattr(tensor, "_local_tensor", tensor)
    held = local.untyped_storage().__dict__.get("_distsim_held") if local.is_cuda else None
    return None if held is None or held.block is None else held.block.tag


def _claim(tensor: Any, kind: str, owner: Tag | None = None) -> Tag | None:
    tag = tag_of(tensor) if isinstance(tensor, Tensor) else None
    if tag is not None:
        tag.kind = kind
        if owner is not None:
            tag.module = owner.module
    return tag


def claim_of_optimizer(optimizer: Any) -> None:
    """What *optimizer* updates, by what, and what it keeps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tag = _claim(parameter, PARAMETERS)
            if parameter.grad is not None:
                _claim(parameter.grad, GRADIENTS, tag)
    for parameter, state in list(optimizer.state.items()):
        tag = tag_of(parameter) if isinstance(parameter, Tensor) else None
        for value in state.values() if isinstance(state, dict) else ():
            _claim(value, OPTIMIZER, tag)


def claim_buffers(tensors: Iterable[Tensor]) -> None:
    """A collective reads or writes *tensors*."""
    for tensor in tensors:
        tag = tag_of(tensor)
        if tag is not None and tag.kind in (ACTIVATIONS, OTHER):  # what it is besides, an optimizer says
            tag.kind = COMMUNICATION


def claim_all() -> bool:
    """Parameters, their gradients and optimizers' state, wherever they are: for a moment at which no optimizer has made
    a step. Whether some parameter is a part of a larger one (FSDP)."""
    sharded = False
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, torch.nn.Parameter):
            sharded = sharded or hasattr(found, "_local_tensor") or hasattr(found, "_is_flat_param")
            _claim(found, PARAMETERS)
            if found.grad is not None:
                _claim(found.grad, GRADIENTS)
        elif issubclass(kind, torch.optim.Optimizer):
            claim_of_optimizer(found)
    return sharded
