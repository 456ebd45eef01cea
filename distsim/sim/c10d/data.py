"""What a collective does to CPU tensors: exactly what torch's backends compute.

Pure functions over the tensors of all members, in group order. Writes go through `.data`, as a
real backend writes memory: no autograd, no version bump.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Tensors", "copy_into", "reduce_tensors"]

Tensors = Sequence[Tensor]


def copy_into(target: Tensor, source: Tensor) -> None:
    """Write *source* (same number of elements) into *target*'s memory."""
    if target.numel() == 0:
        return
    source = source.detach()
    if source.shape != target.shape:
        source = source.reshape(target.shape)
    if target.is_inference() or torch.is_inference_mode_enabled():
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.data.copy_(source)
    else:  # neither side asks for a gradient: no mode to enter, which takes longer than a small copy
        target.data.copy_(source)


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.minimum(a, b, out=a)


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b, out=a)


_FOLD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MIN": _minimum,
    "MAX": _maximum,
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}


@torch.no_grad()
def reduce_tensors(tensors: Tensors, op: str) -> Tensor:
    """The reduction of equal-sized *tensors* by *op*, folded in group order into a new tensor."""
    first = tensors[0].detach()
    total = first.clone(memory_format=torch.contiguous_format)
    shape = total.shape
    others = [t if t.shape == shape else t.reshape(shape) for t in [t.detach() for t in tensors[1:]]]
    total = functools.reduce(_FOLD[op], others, total)
    if op == "AVG":
        total = (
            total.div_(len(tensors))
            if total.is_floating_point() or total.is_complex()
            else total.floor_divide_(len(tensors))
        )
    return total
