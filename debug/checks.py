"""Do the calls of one meeting agree? Pure comparisons of records, one aspect at a time.

A meeting is what the members of a group bring to one sequence number. The majority is right
until other evidence says more: the culprits are the ranks that differ from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, Group, Site
from distsim.debug.vote import Vote, blame_conflicts, majority

__all__ = ["Mismatch", "check_meeting", "check_pair", "itemsize", "payload_text", "same_call"]

Shape = tuple[int, ...]

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
BARRIERS = frozenset({"barrier", "monitored_barrier", "init_process_group", "destroy_process_group"})
REDUCING = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)

_ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "half"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "float", "int"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "double", "long", "complex64"), 8),
    "complex128": 16,
}
"""Bytes an element, by torch's dtype names."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks that met in one call and do not agree about it."""

    kind: Kind
    group: Group
    seq: int
    culprits: tuple[int, ...]
    """Global ranks that differ from the reference side."""
    reference: tuple[int, ...]
    """Global ranks that agree with each other: the majority, or in a tie the lowest rank's side."""
    expected: str
    """What the reference side says: `all_reduce`, `float32[4,8]`, `SUM`."""
    found: Mapping[int, str]
    """What each culprit says."""
    tie: bool
    """There was no majority."""
    records: Mapping[int, CallRecord]

    @property
    def culprit_sites(self) -> dict[int, Site]:
        return {r: site for r in self.culprits if (site := self.records[r].site) is not None}

    def swapped(self) -> Mismatch:
        """The same seen from the other side: the reference becomes the culprit."""
        said = next(iter(self.found.values()), "")
        found = dict.fromkeys(self.reference, self.expected)
        return replace(
            self, culprits=self.reference, reference=self.culprits, expected=said, found=found, tie=False
        )

    def __str__(self) -> str:
        """One line in the house's form: `expected ..., got ..., at rank R, group G, call #N, file:line`."""
        rank = self.culprits[0]
        record = self.records[rank]
        at = f", {record.site}" if record.site else ""
        return (
            f"{self.kind.label}: expected {self.expected}, got {self.found[rank]}, "
            f"at rank {rank}, group {self.group.label}, call #{self.seq} ({record.op}){at}"
        )


def check_meeting(
    records: Sequence[CallRecord],
    histories: Mapping[int, Sequence[CallRecord]] | None = None,
) -> Mismatch | None:
    """Compare the calls that ranks of one group brought to the same sequence number.

    Members may be absent: what is there is compared. *histories* (each rank's own earlier records)
    settles a tie: the rank that says something else than it used to at the same line is the culprit.
    Without a majority and without history, the side of the lowest group rank is the reference.
    """
    if len(records) < 2:
        return None
    first = records[0]
    position = {rank: i for i, rank in enumerate(first.group.ranks)}
    ordered = sorted(records, key=lambda r: position.get(r.rank, len(position)))
    found = _first_difference(ordered, histories or {})
    if found is None:
        return None
    kind, vote, says = found
    return Mismatch(
        kind=kind,
        group=first.group,
        seq=first.seq,
        culprits=vote.culprits,
        reference=vote.reference,
        expected=says[vote.reference[0]] if vote.reference else "something else",
        found={rank: says[rank] for rank in vote.culprits},
        tie=vote.tie,
        records={record.rank: record for record in ordered},
    )


Found = tuple[Kind, Vote, Mapping[int, str]]


def _first_difference(
    ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]
) -> Found | None:
    ops = {r.rank: r.op for r in ordered}
    if found := _differ(Kind.OP_MISMATCH, ordered, ops, ops, histories):
        return found
    op = ordered[0].op
    if op in BARRIERS:
        return None
    if op == "new_group":
        asked: dict[int, Hashable] = {r.rank: r.new_ranks for r in ordered}
        says = {r.rank: f"new_group({list(r.new_ranks or ())})" for r in ordered}
        return _differ(Kind.GROUP_CREATION_ORDER, ordered, asked, says, histories)
    if op in ROOTED and all(r.root is not None for r in ordered):
        roots: dict[int, Hashable] = {r.rank: r.root for r in ordered}
        says = {r.rank: f"root {r.root}" for r in ordered}
        if found := _differ(Kind.ROOT_MISMATCH, ordered, roots, says, histories):
            return found
    if found := _sizes(op, ordered, histories):
        return found
    dtypes: dict[int, Hashable] = {r.rank: _dtypes(r) for r in ordered if r.dtypes}
    says = {r.rank: ", ".join(r.dtypes) for r in ordered}
    if found := _differ(Kind.DTYPE_MISMATCH, ordered, dtypes, says, histories):
        return found
    if op in REDUCING:
        reduce_ops: dict[int, Hashable] = {r.rank: r.reduce_op for r in ordered if r.reduce_op}
        says = {r.rank: str(r.reduce_op) for r in ordered}
        return _differ(Kind.REDUCE_OP_MISMATCH, ordered, reduce_ops, says, histories)
    return None


def _differ(
    kind: Kind,
    ordered: Sequence[CallRecord],
    values: Mapping[int, Hashable],
    says: Mapping[int, str],
    histories: Mapping[int, Sequence[CallRecord]],
) -> Found | None:
    if len(set(values.values())) < 2:
        return None
    vote = majority(values)
    if vote.tie and histories:
        vote = _settle(vote, kind, ordered, histories)
    return kind, vote, says


_ASPECT: dict[Kind, Callable[[CallRecord], Hashable]] = {
    Kind.OP_MISMATCH: lambda r: r.op,
    Kind.ROOT_MISMATCH: lambda r: r.root,
    Kind.SHAPE_MISMATCH: lambda r: (r.input_shapes, r.output_shapes),
    Kind.SPLITS_MISMATCH: lambda r: (r.input_splits, r.output_splits),
    Kind.DTYPE_MISMATCH: lambda r: r.dtypes,
    Kind.REDUCE_OP_MISMATCH: lambda r: r.reduce_op,
    Kind.GROUP_CREATION_ORDER: lambda r: r.new_ranks,
}


def _settle(
    vote: Vote, kind: Kind, ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]
) -> Vote:
    """A tie: blame the ranks that left their own habit at this line, if the others kept theirs."""
    aspect = _ASPECT[kind]
    strayed: list[int] = []
    for record in ordered:
        past = [
            aspect(p)
            for p in histories.get(record.rank, ())
            if p is not record
            and p.index < record.index
            and p.site == record.site
            and p.group.ranks == record.group.ranks
        ]
        if past and aspect(record) not in past:
            strayed.append(record.rank)
    everyone = tuple(r.rank for r in ordered)
    if not strayed or len(strayed) == len(everyone):
        return vote
    return Vote(tuple(r for r in everyone if r not in strayed), tuple(strayed), tie=False)


def _dtypes(record: CallRecord) -> Hashable:
    return record.dtypes[0] if len(set(record.dtypes)) == 1 else record.dtypes


# --- sizes: what each operation demands ------------------------------------------------------------


def _sizes(
    op: str, ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]
) -> Found | None:
    if op in ("all_to_all", "all_to_all_single"):
        return _all_to_all(ordered)
    if op == "scatter":
        return _lists(ordered, lists_of="input", items_of="output")
    if op == "gather":
        return _lists(ordered, lists_of="output", items_of="input")
    if op == "all_gather":
        return _lists(ordered, lists_of="output", items_of="input")
    lists = op == "reduce_scatter" and any(len(r.input_shapes) > 1 for r in ordered)
    if lists and (found := _lists(ordered, lists_of="input", items_of="output")):
        return found
    values: dict[int, Hashable] = {}
    for record in ordered:
        shapes = record.input_shapes or record.output_shapes
        if op == "broadcast":  # only the number of elements matters
            values[record.rank] = tuple(prod(s) for s in shapes)
        else:
            values[record.rank] = tuple(tuple(n for n in s if n != 1) for s in shapes)
    if found := _differ(Kind.SHAPE_MISMATCH, ordered, values, _texts(ordered), histories):
        return found
    return None


def _texts(ordered: Sequence[CallRecord]) -> dict[int, str]:
    return {r.rank: payload_text(r) for r in ordered}


def _lists(ordered: Sequence[CallRecord], lists_of: str, items_of: str) -> Found | None:
    """Item j of a rank's tensor list must be as large as the tensor of group rank j."""

    def lists(record: CallRecord) -> tuple[Shape, ...]:
        return record.input_shapes if lists_of == "input" else record.output_shapes

    def item(record: CallRecord) -> Shape | None:
        shapes = record.output_shapes if items_of == "output" else record.input_shapes
        return shapes[0] if len(shapes) == 1 else None

    group = ordered[0].group.ranks
    by_rank = {r.rank: r for r in ordered}
    items = [item(by_rank[rank]) if rank in by_rank else None for rank in group]
    wanted = tuple(items)
    holders = [r for r in ordered if len(lists(r)) == len(group)]
    if holders and all(lists(r) == wanted for r in holders):
        return None
    conflicts: list[tuple[int, int]] = []
    for j, (other, at) in enumerate(zip(group, items, strict=True)):
        if at is None:
            continue
        against = [r.rank for r in holders if lists(r)[j] is not at and prod(lists(r)[j]) != prod(at)]
        agree = len(holders) - len(against)
        if agree > len(against):  # most lists bear the item out: those that do not are wrong
            conflicts += [(holder, holder) for holder in against]
        elif agree < len(against) and len(holders) > 1:
            conflicts.append((other, other))
        else:
            conflicts += [(holder, other) for holder in against]
    if holders:
        if not conflicts:
            return None
        rooted = ordered[0].root
        vote = blame_conflicts(tuple(by_rank), conflicts, innocent=rooted if len(holders) == 1 else None)
        return Kind.SHAPE_MISMATCH, vote, _texts(ordered)
    values: dict[int, Hashable] = {r.rank: prod(at) for r in ordered if (at := item(r)) is not None}
    return _differ(Kind.SHAPE_MISMATCH, ordered, values, _texts(ordered), {})


def _all_to_all(ordered: Sequence[CallRecord]) -> Found | None:
    """What i sends to j is what j expects from i: rank i's input split j == rank j's output split i."""
    group = ordered[0].group.ranks
    sends = {
        r.rank: s
        for r in ordered
        if (s := _splits(r, len(group), r.input_splits, r.input_shapes)) is not None
    }
    takes = {
        r.rank: s
        for r in ordered
        if (s := _splits(r, len(group), r.output_splits, r.output_shapes)) is not None
    }
    if len(sends) == len(takes) == len(group):  # all there: compare whole columns at once
        columns = zip(*(sends[rank] for rank in group), strict=True)
        if all(column == takes[rank] for rank, column in zip(group, columns, strict=True)):
            return None
    conflicts = [
        (a, b)
        for i, a in enumerate(group)
        if a in sends
        for j, b in enumerate(group)
        if b in takes and sends[a][j] != takes[b][i]
    ]
    if not conflicts:
        return None
    says = {
        r.rank: f"sends {list(sends.get(r.rank, ()))}, expects {list(takes.get(r.rank, ()))}" for r in ordered
    }
    given = any(r.input_splits or r.output_splits for r in ordered)
    kind = Kind.SPLITS_MISMATCH if given else Kind.SHAPE_MISMATCH
    return kind, blame_conflicts(tuple(r.rank for r in ordered), conflicts), says


def _splits(
    record: CallRecord, num_ranks: int, splits: tuple[int, ...] | None, shapes: tuple[Shape, ...]
) -> tuple[int, ...] | None:
    """Elements for (or from) each group rank; None where the record does not tell."""
    if record.op == "all_to_all":
        return tuple(prod(s) for s in shapes) if len(shapes) == num_ranks else None
    if len(shapes) != 1:
        return tuple(splits) if splits and len(splits) == num_ranks else None
    rows, row = (shapes[0][0], prod(shapes[0][1:])) if shapes[0] else (1, 1)
    if not splits:
        return (rows // num_ranks * row,) * num_ranks if rows % num_ranks == 0 else None
    return tuple(n * row for n in splits) if len(splits) == num_ranks else None


# --- point to point --------------------------------------------------------------------------------


def check_pair(send: CallRecord, recv: CallRecord) -> Mismatch | None:
    """Compare a send with the receive it is to meet: tag, size in bytes, dtype.

    There is no majority of two, so both ends are culprits and it is a tie; `diagnose` asks the
    ranks' histories as well.
    """
    kind: Kind | None = None
    says: dict[int, str] = {}
    if send.tag is not None and recv.tag is not None and send.tag != recv.tag:
        kind, says = Kind.P2P_UNMATCHED, {send.rank: f"tag {send.tag}", recv.rank: f"tag {recv.tag}"}
    elif _bytes(send) != _bytes(recv):
        kind, says = Kind.P2P_SIZE_MISMATCH, _texts((send, recv))
    elif send.dtypes and recv.dtypes and send.dtypes[0] != recv.dtypes[0]:
        kind, says = Kind.DTYPE_MISMATCH, {send.rank: send.dtypes[0], recv.rank: recv.dtypes[0]}
    if kind is None:
        return None
    return Mismatch(
        kind=kind,
        group=recv.group,
        seq=recv.seq,
        culprits=(send.rank, recv.rank),
        reference=(),
        expected=says[recv.rank],
        found=says,
        tie=True,
        records={send.rank: send, recv.rank: recv},
    )


def itemsize(dtype: str) -> int:
    """Bytes of one element; 1 for a dtype nobody knows here."""
    return _ITEMSIZE.get(dtype.removeprefix("torch."), 1)


def _bytes(record: CallRecord) -> int:
    shapes = record.input_shapes or record.output_shapes
    if not shapes or not record.dtypes:
        return record.nbytes
    return sum(prod(s) for s in shapes) * itemsize(record.dtypes[0])


def payload_text(record: CallRecord) -> str:
    """`float32[4,8]`; lists are cut after three tensors."""
    shapes = record.input_shapes or record.output_shapes
    dtype = record.dtypes[0] if record.dtypes else ""
    if not shapes:
        return dtype or (f"{record.nbytes} B" if record.nbytes else "no tensor")
    texts = [f"{dtype}[{','.join(map(str, s))}]" for s in shapes[:3]]
    more = f", ... {len(shapes)} in all" if len(shapes) > 3 else ""
    return ", ".join(texts) + more


def same_call(a: CallRecord, b: CallRecord) -> bool:
    """Cheap and exact: nothing that any rank may not have differently is different."""
    return (
        a.op == b.op
        and a.input_shapes == b.input_shapes
        and a.dtypes == b.dtypes
        and a.reduce_op == b.reduce_op
        and a.root == b.root
        and a.input_splits == b.input_splits
        and a.new_ranks == b.new_ranks
    )
