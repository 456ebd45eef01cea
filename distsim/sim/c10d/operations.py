"""Data movement of each collective: its results, its transfer, and the memory that gloo reads and writes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from distsim.debug.records.arguments import MethodCall
from distsim.errors import NotSimulated
from distsim.network import Transfer
from distsim.sim.c10d.refusals import even_shares
from distsim.sim.c10d.work import Arrival, CallMembers, Tensors
from distsim.torch_compat.device import FOREACH_COPY

# -- What backends do to CPU tensors. Pure functions over the tensors of all members, in group order. Writes go through
# `.data`, as a real backend writes memory: no autograd, no version bump.

_foreach_copy_ = FOREACH_COPY.get()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of the members' tensors in two steps, so that a guard looks at one tensor between them."""

    fold: Callable[[CallMembers], list[Tensor]]
    """Sum of the members' inputs before any output is written, to check for NaN. Empty if they have no plain memory."""
    write: Callable[[CallMembers, list[Tensor]], None]

    def __call__(self, members: CallMembers) -> None:
        self.write(members, self.fold(members))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Write *source* (same number of elements) into *target*'s memory."""
    if target.numel() == 0:
        return
    source = source.detach()
    if source.numel() != target.numel():  # its memory was given away while it was sent: what arrives is chance
        return
    if source.shape != target.shape:
        source = source.reshape(target.shape)
    if target.is_inference() or torch.is_inference_mode_enabled():
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.data.copy_(source)
    else:  # neither side asks for a gradient: no mode to enter, which takes longer than a small copy
        target.data.copy_(source)


def copy_into_all(targets: Tensors, source: Tensor) -> None:
    """Copy *source* into each of *targets*, in one step if they are plain tensors."""
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


def _once(tensor: Tensor, count: int) -> Tensor:
    return tensor


_REPEATED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "SUM": Tensor.mul,
    "AVG": Tensor.mul,
    "PRODUCT": Tensor.pow,
    "MIN": _once,
    "MAX": _once,
    "BAND": _once,
    "BOR": _once,
    "BXOR": lambda tensor, count: tensor if count % 2 else torch.zeros_like(tensor),
}
"""The reduction of *count* equal tensors."""


@torch.no_grad()
def reduce_tensors(tensors: Tensors, op: str, count: int | None = None) -> Tensor:
    """Return the reduction of equal-sized *tensors* by *op*, folded in group order into a new tensor.

    An average is over *count* members, or over all *tensors*.
    """
    first = tensors[0].detach()
    total = first.clone(memory_format=torch.contiguous_format)
    shape = total.shape
    others = [t if t.shape == shape else t.reshape(shape) for t in [t.detach() for t in tensors[1:]]]
    total = reduce(_FOLD[op], others, total)
    if op == "AVG":
        count = count or len(tensors)
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.floor_divide_(count) if whole else total.div_(count)
    return total


# -- What each collective moves (for the network) and computes (on CPU tensors).


DataFunction = Callable[[CallMembers], None]
"""Writes the members' outputs."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective: its network transfer, and its effect on the members' tensors."""

    data: DataFunction
    network_op: str | None = None
    """Operation whose algorithm the network runs, if it differs from this one."""

    def transfer(self, members: CallMembers, devices: tuple[str, ...], key: int) -> Transfer:
        """Return the transfer between the *members* on *devices*. *key* tells groups apart (`Transfer.key`)."""
        first = members[0]
        record = first.record
        return Transfer(
            op=self.network_op or record.op,
            flavour=algorithms(first.library),
            devices=devices,
            nbytes=record.nbytes if record.op != "all_to_all" else max(m.record.nbytes for m in members.came.values()),
            root=_root(members) if record.root is not None else 0,
            splits=_splits(members) if record.op in ("all_to_all", "all_to_all_single") else None,
            reduce_op=record.reduce_op or "SUM",
            key=key,
        )


def algorithms(backend: str) -> str:
    """Return the library whose algorithms a backend uses: gloo for `sim`, and for torch's `fake` of one rank."""
    return "gloo" if backend in ("sim", "fake") else backend


def _splits(members: CallMembers) -> tuple[tuple[int, ...], ...] | None:
    """Return the bytes from each member to each other; None if all are equal."""
    rows = {}
    for member in members.came.values():
        if member.record.op == "all_to_all":
            rows[id(member)] = tuple(tensor.nbytes for tensor in member.inputs)
        else:
            tensor = member.inputs[0]
            unit = tensor.nbytes // max(1, tensor.shape[0]) if tensor.dim() else tensor.nbytes
            rows[id(member)] = tuple(size * unit for size in _sent(member, len(members)))
    if len({size for row in rows.values() for size in row}) <= 1:
        return None
    return tuple(rows[id(member)] for member in members)


def _sent(member: Arrival, num_members: int) -> tuple[int, ...]:
    """Return the rows of all_to_all_single's input for each member."""
    return member.record.input_splits or even_shares(member.inputs[0], num_members)


def _root(members: CallMembers) -> int:
    """Rank in the group."""
    record = members[0].record
    assert record.root is not None
    return record.group.ranks.index(record.root)


def _there(members: CallMembers) -> list[tuple[int, Arrival]]:
    """Return the members that arrived themselves, with their indices.

    Nobody reads the results of the others.
    """
    return sorted(members.came.items(), key=operator.itemgetter(0))


def _broadcast(members: CallMembers) -> None:
    root = _root(members)
    for index, member in _there(members):
        if index != root:
            for target, source in zip(member.outputs, members[root].inputs, strict=True):
                copy_into(target, source)


def _all_reduce(members: CallMembers, totals: list[Tensor]) -> None:
    """Write *totals* to the members' outputs.

    All totals are computed before anything is written, because one tensor may occur twice or overlap with another.
    """
    if any(tensor.is_sparse for tensor in members[0].inputs):
        for position in range(len(members[0].inputs)):
            _all_reduce_sparse(members, position)
        return
    there = [member for _, member in _there(members)]
    if len(totals) == 1:
        copy_into_all([member.outputs[0] for member in there], totals[0])
        return
    for member in there:
        for target, total in zip(member.outputs, totals, strict=True):
            copy_into(target, total)


def _dense_totals(members: CallMembers) -> list[Tensor]:
    return [] if any(tensor.is_sparse for tensor in members[0].inputs) else _totals(members)


def _totals(members: CallMembers) -> list[Tensor]:
    op = members[0].record.reduce_op or "SUM"
    positions = range(len(members[0].inputs))
    return [_reduced(members, position, op) for position in positions]


def _reduced(members: CallMembers, position: int, op: str) -> Tensor:
    """Return the reduction by *op* of the inputs at *position*, those of equal members at once."""
    if members.all_came():
        return reduce_tensors([m.inputs[position] for m in members], op)
    counts = members.counts()
    return reduce_tensors([_REPEATED[op](m.inputs[position].detach(), n) for m, n in counts], op, len(members))


def _all_reduce_sparse(members: CallMembers, position: int) -> None:
    total = reduce(operator.add, [member.inputs[position] for member in members])
    for _, member in _there(members):
        with torch.no_grad():
            member.outputs[position].copy_(total)


def _reduce(members: CallMembers) -> None:
    root = _root(members)
    for index, member in _there(members):
        if index == root:
            copy_into(member.outputs[0], _totals(members)[0])


def _all_gather(members: CallMembers) -> None:
    sources = _sources(members, 0)
    for _, member in _there(members):
        for target, source in zip(member.outputs, sources, strict=True):
            copy_into(target, source)


def _sources(members: CallMembers, position: int) -> list[Tensor]:
    """Return copies of the inputs, which may be among the outputs; those of equal members are one tensor."""
    copies = {id(m): m.inputs[position].detach().clone() for m in members.came.values()}
    return [copies[id(m)] for m in members]


def _all_gather_coalesced(members: CallMembers) -> None:
    """Write the flat outputs: output_lists[rank][position]."""
    sources = [tensor.detach().clone() for member in members for tensor in member.inputs]
    for _, member in _there(members):
        for target, source in zip(member.outputs, sources, strict=True):
            copy_into(target, source)


def _all_gather_into(members: CallMembers) -> None:
    """Write one output for each input: the members' inputs one after the other."""
    positions = range(len(members[0].inputs))
    wholes = [torch.cat([source.reshape(-1) for source in _sources(members, position)]) for position in positions]
    for _, member in _there(members):
        for target, whole in zip(member.outputs, wholes, strict=True):
            copy_into(target, whole)


def _gather(members: CallMembers) -> None:
    index = _root(members)
    root = members[index]
    if root.record.rank != root.record.group.ranks[index]:
        return
    own = root.inputs[0].detach().clone()  # it may be among the outputs
    for target, source in zip(root.outputs, members, strict=True):
        copy_into(target, own if source is root else source.inputs[0])


def _scatter(members: CallMembers) -> None:
    root = members[_root(members)]
    for index, member in _there(members):
        copy_into(member.outputs[0], root.inputs[index])


def _reduce_scatter(members: CallMembers) -> None:
    there, op = _there(members), members[0].record.reduce_op or "SUM"
    totals = [_reduced(members, index, op) for index, _ in there]
    for (_, member), total in zip(there, totals, strict=True):
        copy_into(member.outputs[0], total)


def _reduce_scatter_single(members: CallMembers, totals: list[Tensor]) -> None:
    there = _there(members)
    for position, total in enumerate(totals):
        parts = total.reshape(-1).chunk(len(members))
        for index, member in there:
            copy_into(member.outputs[position], parts[index])


def _all_to_all(members: CallMembers) -> None:
    copies = [(m.outputs[j], members[j].inputs[i]) for i, m in _there(members) for j in range(len(members))]
    sources = [source.detach().clone() for _, source in copies]  # input and output may share memory
    for (target, _), source in zip(copies, sources, strict=True):
        copy_into(target, source)


def _rows(tensor: Tensor, splits: tuple[int, ...]) -> list[Tensor]:
    flat = tensor.detach().reshape(-1)
    row = flat.numel() // max(1, tensor.shape[0]) if tensor.dim() else 1
    ends = list(accumulate(size * row for size in splits))
    return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _all_to_all_single(members: CallMembers) -> None:
    sent = {id(m): [p.clone() for p in _rows(m.inputs[0], _sent(m, len(members)))] for m in members.came.values()}
    for index, member in _there(members):
        pieces = [sent[id(m)][index] for m in members]
        if any(p.numel() for p in pieces):
            copy_into(member.outputs[0], torch.cat(pieces))


def nothing(members: CallMembers) -> None:
    """Change no tensor."""


OPERATIONS = {
    "broadcast": Operation(_broadcast),
    "all_reduce": Operation(Reduction(_dense_totals, _all_reduce)),
    "all_reduce_coalesced": Operation(Reduction(_dense_totals, _all_reduce), network_op="all_reduce"),
    "reduce": Operation(_reduce),
    "all_gather": Operation(_all_gather),
    "all_gather_coalesced": Operation(_all_gather_coalesced, network_op="all_gather"),
    "all_gather_into_tensor": Operation(_all_gather_into),
    "all_gather_into_tensor_coalesced": Operation(_all_gather_into, network_op="all_gather_into_tensor"),
    "gather": Operation(_gather),
    "scatter": Operation(_scatter),
    "reduce_scatter": Operation(_reduce_scatter),
    "reduce_scatter_tensor": Operation(Reduction(_totals, _reduce_scatter_single)),
    "reduce_scatter_tensor_coalesced": Operation(
        Reduction(_totals, _reduce_scatter_single), network_op="reduce_scatter_tensor"
    ),
    "all_to_all": Operation(_all_to_all),
    "all_to_all_single": Operation(_all_to_all_single),
    "barrier": Operation(nothing),
}


# -- The memory that gloo reads and writes: not always what the tensor shows.
#
# For some collectives gloo 2.13 takes `numel` elements in a row from the tensor's first one, whatever its
# strides are (read off real groups; tests/conformance/test_aliases.py holds both arms to it). What is
# beyond the tensor's own memory, or depends on which byte comes first, is refused by name.

_RAW_INPUTS = frozenset({"all_reduce", "broadcast", "reduce", "scatter"})
_RAW_OUTPUTS = frozenset({"all_reduce", "broadcast", "reduce", "scatter", "all_to_all_single"})
_WRITES_IN_PLACE = _RAW_INPUTS | {"all_reduce_coalesced", "reduce_scatter"}
_LOSES_CONJUGATES = frozenset({"reduce", "reduce_scatter"})


def as_gloo_sees(call: MethodCall, flavour: str, rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return inputs and outputs of *call* on *rank* as plain memory, as gloo treats them.

    *flavour* is the backend. Only gloo adds up bools as bytes, and divides an all_to_all_single without splits by
    elements.

    Raises:
        NotSimulated: gloo's result would be undefined.
    """
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
                "gloo may send what it has just received: use a separate output tensor",
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
            "reduce_scatter with an output that overlaps its input",
            "gloo sends what it has just written: use a separate output tensor",
        )
    return (
        tuple(_memory(op, t) for t in inputs) if op in _RAW_INPUTS else tuple(inputs),
        tuple(_memory(op, t) for t in outputs) if op in _RAW_OUTPUTS else tuple(outputs),
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor shows its memory as it is, from the first element on."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _loses(op: str, output: Tensor) -> bool:
    if not output.is_conj():
        return bool(output.is_neg())
    return op in _LOSES_CONJUGATES or not output.is_contiguous()


def _is_permuted(tensor: Tensor) -> bool:
    """Return whether the elements fill a piece of memory without gaps in another order, which gloo sends as it is."""
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
            "gloo would write outside its memory: call .contiguous() first",
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
