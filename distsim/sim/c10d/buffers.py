"""The memory that gloo reads and writes: not always what the tensor shows.

For some collectives gloo 2.13 takes `numel` elements in a row from the tensor's first one, whatever its
strides are (read off real groups; tests/conformance/test_aliases.py holds both arms to it). What is
beyond the tensor's own memory, or depends on which byte comes first, is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distsim.debug.records.arguments import Call
from distsim.errors import NotSimulated

__all__ = ["as_gloo_sees"]

_RAW_INPUTS = frozenset({"all_reduce", "broadcast", "reduce", "scatter"})
_RAW_OUTPUTS = frozenset({"all_reduce", "broadcast", "reduce", "scatter", "all_to_all_single"})
_WRITES_IN_PLACE = _RAW_INPUTS | {"all_reduce_coalesced", "reduce_scatter"}
_LOSES_CONJUGATES = frozenset({"reduce", "reduce_scatter"})


def as_gloo_sees(call: Call, flavour: str, rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs and outputs of *call* on *rank* of the group as the memory behind them. Raises
    `NotSimulated` where gloo's answer is undefined. *flavour*: the backend, of which gloo alone adds up bools as bytes,
    and divides an all_to_all_single by elements where no splits are given."""
    seen = _seen(call.key[0], rank, call.inputs, call.outputs)
    if flavour not in ("gloo", "sim"):
        return seen
    if call.key[0] == "all_to_all_single" and not call.key[6] and not call.key[7]:
        return _flat(seen[0]), _flat(seen[1])
    if call.key[4] is None or call.first.dtype is not torch.bool:
        return seen
    inputs, outputs = (tuple([t.view(torch.uint8) if t.layout is torch.strided else t for t in part]) for part in seen)
    return inputs, outputs


def _flat(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([t.view(-1) if t.is_contiguous() and not t.is_neg() else t for t in tensors])


def _seen(
    op: str, rank: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    if op in _RAW_INPUTS and all(map(_is_plain, inputs if inputs is outputs else (*inputs, *outputs))):
        return tuple(inputs), tuple(outputs)
    if op == "all_to_all_single":
        if not all(t.is_contiguous() for t in inputs):
            raise ValueError("Tensors must be contiguous")
        if any(_overlap(a, b) for a in inputs for b in outputs):
            raise NotSimulated(
                "all_to_all_single into the memory it sends from",
                "gloo may send what it has just received: give it an output of its own",
            )
    if op in _WRITES_IN_PLACE and any(_loses(op, t) for t in outputs):
        raise NotSimulated(
            f"{op} into a conjugate or negated view",
            "gloo's result is lost: call resolve_conj() and resolve_neg() first",
        )
    if op == "reduce_scatter" and (
        any(_is_permuted(t) for t in inputs) or not all(t.is_contiguous() or t.is_neg() for t in outputs)
    ):
        raise NotSimulated(
            "reduce_scatter with tensors that are not contiguous",
            "gloo adds up elements that do not belong together: call .contiguous() first",
        )
    if op == "reduce_scatter" and any(_overlap(t, o) for i, t in enumerate(inputs) if i != rank for o in outputs):
        raise NotSimulated(
            "reduce_scatter into what it sends to another rank",
            "gloo sends what it has just written: give it an output of its own",
        )
    return (
        tuple(_memory(op, t) for t in inputs) if op in _RAW_INPUTS else tuple(inputs),
        tuple(_memory(op, t) for t in outputs) if op in _RAW_OUTPUTS else tuple(outputs),
    )


def _is_plain(tensor: Tensor) -> bool:
    """What it shows is what lies in its memory, from its first element on."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _loses(op: str, output: Tensor) -> bool:
    if not output.is_conj():
        return bool(output.is_neg())
    return op in _LOSES_CONJUGATES or not output.is_contiguous()


def _is_permuted(tensor: Tensor) -> bool:
    """Its elements fill a piece of memory without a gap, in another order than theirs: gloo takes it as it lies."""
    if tensor.layout is not torch.strided or tensor.is_contiguous() or tensor.is_neg():
        return False
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


def _memory(op: str, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_contiguous() or tensor.is_meta:
        return tensor
    if tensor.is_neg():  # torch makes gloo a plain copy
        return tensor
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.storage_offset() + tensor.numel() > size:
        raise NotSimulated(
            f"{op} on a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            "gloo goes beyond its memory: call .contiguous() first",
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel() or a.is_meta or b.is_meta:
        return False
    first, second = (_span(t) for t in (a, b))
    return first[0] < second[1] and second[0] < first[1]


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()
