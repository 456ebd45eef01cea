"""What a collective does to CPU tensors: exactly what torch's backends compute.

Pure functions over the tensors of all members, in group order. Writes go through `.data`, as a
real backend writes memory: no autograd, no version bump.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distsim.torch_compat.device import FOREACH_COPY

__all__ = ["Reduction", "Tensors", "copy_into", "copy_into_all", "reduce_tensors"]

_foreach_copy_ = FOREACH_COPY.get()

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a reduction does to its members' tensors, in two steps: between them a guard looks at one tensor instead of
    every member's. Members are `arrival.Arrival`s."""

    fold: Callable[[list[Any]], list[Tensor]]
    """The members' inputs together; nothing is written yet. A NaN in one of them is in it; empty where they have no
    plain memory."""
    write: Callable[[list[Any], list[Tensor]], None]

    def __call__(self, members: list[Any]) -> None:
        self.write(members, self.fold(members))


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


def copy_into_all(targets: Tensors, source: Tensor) -> None:
    """`copy_into` each of *targets*, in one step where they are plain."""
    if torch.is_inference_mode_enabled() or not source.numel() or not all(_is_like(t, source) for t in targets):
        for target in targets:
            copy_into(target, source)
        return
    _foreach_copy_([target.data for target in targets], [source.detach()] * len(targets))


def _is_like(target: Tensor, source: Tensor) -> bool:
    return (
        target.shape == source.shape
        and target.layout is torch.strided
        and not (target.is_inference() or target.is_conj() or target.is_neg())
    )


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
