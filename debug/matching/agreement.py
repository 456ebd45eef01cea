"""Comparison of the calls of one meeting: pure functions of records, one aspect at a time.

A meeting is the set of calls that the members of a group make under one sequence number. The majority is right, or,
in a tie, the side of the lowest rank unless other evidence decides. The culprits are the ranks that differ from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from distsim.debug.records import CallRecord, Group
from distsim.debug.records.arguments import FIELDS
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import CREATIONS

ROOTED = frozenset(op for op, fields in FIELDS.items() if fields.rooted)
BY_LISTS = frozenset(op for op, fields in FIELDS.items() if fields.pairwise)
"""Operations for which equal calls are not enough: one rank's list is compared with the other ranks' tensors."""
BARRIERS = frozenset(
    {"barrier", "monitored_barrier", "init_process_group", "destroy_process_group", "init_rpc", "rpc_shutdown"}
    | (CREATIONS - {"new_group"})
)
REDUCING = frozenset(op for op, fields in FIELDS.items() if fields.reduces)

_ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "half"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "float", "int"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "double", "long", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by torch's dtype names."""
Shape = tuple[int, ...]

Difference = tuple[Kind, "Vote", Mapping[int, str]]
"""An aspect in which calls differ: its kind, the ranks that differ, and the value of each rank."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks whose calls with one number disagree."""

    kind: Kind
    group: Group
    seq: int
    culprits: tuple[int, ...]
    """Global ranks that differ from the reference side."""
    reference: tuple[int, ...]
    """Global ranks that agree with each other: the majority, or in a tie the lowest rank's side."""
    expected: str
    """Value on the reference side: `all_reduce`, `float32[4,8]`, `SUM`."""
    actual: Mapping[int, str]
    """Value on each culprit."""
    tie: bool
    """Whether neither side has a majority."""
    records: Mapping[int, CallRecord]

    def swapped(self) -> Mismatch:
        """Return the mismatch with the reference as the culprit."""
        expected = next(iter(self.actual.values()), "")
        descriptions = dict.fromkeys(self.reference, self.expected)
        return replace(
            self, culprits=self.reference, reference=self.culprits, expected=expected, actual=descriptions, tie=False
        )

    def __str__(self) -> str:
        """Return one line: `expected ..., got ..., at rank R, group G, call #N, file:line`."""
        rank = self.culprits[0]
        record = self.records[rank]
        at = f", {record.site}" if record.site else ""
        return (
            f"{self.kind.label}: expected {self.expected}, got {self.actual[rank]}, "
            f"at rank {rank}, group {self.group.label}, call #{self.seq} ({record.op}){at}"
        )


def check_meeting(
    records: Sequence[CallRecord],
    histories: Mapping[int, Sequence[CallRecord]] | None = None,
) -> Mismatch | None:
    """Compare the calls that ranks of one group made as the same sequence number.

    Members may be absent; the others are compared. *histories* (each rank's earlier records) settle a tie: the rank
    whose call differs from its earlier ones at the same line is the culprit. Without a majority and without history,
    the side of the lowest group rank is the reference.
    """
    if len(records) < 2:
        return None
    first = records[0]
    shares = (first.input_splits, first.output_splits, (*first.input_shapes, *first.output_shapes))
    if first.op not in BY_LISTS or all(len(set(sizes or ())) < 2 for sizes in shares):  # equal calls fit each other
        if all(same_call(first, r) and first.output_shapes == r.output_shapes for r in records):
            return None  # the common case, without any voting
    position = {rank: i for i, rank in enumerate(first.group.ranks)}
    ordered = sorted(records, key=lambda r: position.get(r.rank, len(position)))
    difference = _first_difference(ordered, histories or {})
    if difference is None:
        return None
    kind, vote, says = difference
    return Mismatch(
        kind=kind,
        group=first.group,
        seq=first.seq,
        culprits=vote.culprits,
        reference=vote.reference,
        expected=says[vote.reference[0]] if vote.reference else "something else",
        actual={rank: says[rank] for rank in vote.culprits},
        tie=vote.tie,
        records={record.rank: record for record in ordered},
    )


def _first_difference(
    ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]
) -> Difference | None:
    ops = {r.rank: r.op for r in ordered}
    if result := differ(Kind.OP_MISMATCH, ordered, ops, ops, histories):
        return result
    op = ordered[0].op
    if op in BARRIERS:
        return None
    if op == "new_group":
        members: dict[int, Hashable] = {r.rank: r.new_ranks for r in ordered}
        says = {r.rank: f"new_group({list(r.new_ranks or ())})" for r in ordered}
        if all(len(r.new_ranks or ()) == 1 for r in ordered):
            return None  # groups of one rank meet nobody: `new_subgroups(group_size=1)` makes other ones on each side
        return differ(Kind.GROUP_CREATION_ORDER, ordered, members, says, histories)
    if op in ROOTED and all(r.root is not None for r in ordered):
        roots: dict[int, Hashable] = {r.rank: r.root for r in ordered}
        says = {r.rank: f"root {r.root}" for r in ordered}
        if result := differ(Kind.ROOT_MISMATCH, ordered, roots, says, histories):
            return result
    if result := sizes(op, ordered, histories):
        return result
    dtypes: dict[int, Hashable] = {r.rank: _dtypes(r) for r in ordered if r.dtypes}
    says = {r.rank: ", ".join(r.dtypes) for r in ordered}
    if result := differ(Kind.DTYPE_MISMATCH, ordered, dtypes, says, histories):
        return result
    if op in REDUCING:
        reduce_ops: dict[int, Hashable] = {r.rank: r.reduce_op for r in ordered if r.reduce_op}
        says = {r.rank: str(r.reduce_op) for r in ordered}
        return differ(Kind.REDUCE_OP_MISMATCH, ordered, reduce_ops, says, histories)
    return None


def _dtypes(record: CallRecord) -> Hashable:
    return record.dtypes[0] if len(set(record.dtypes)) == 1 else record.dtypes


def check_pair(send: CallRecord, recv: CallRecord) -> Mismatch | None:
    """Compare a send with its receive: tag, size in bytes, dtype.

    Two calls have no majority, so both ends are culprits of a tie; `diagnose` also uses the ranks' histories.
    """
    kind: Kind | None = None
    says: dict[int, str] = {}
    if send.tag is not None and recv.tag is not None and send.tag != recv.tag:
        kind, says = Kind.P2P_UNMATCHED, {send.rank: f"tag {send.tag}", recv.rank: f"tag {recv.tag}"}
    elif _bytes(send) != _bytes(recv):
        kind, says = Kind.P2P_SIZE_MISMATCH, texts((send, recv))
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
        actual=says,
        tie=True,
        records={send.rank: send, recv.rank: recv},
    )


def itemsize(dtype: str) -> int:
    """Return the bytes of one element; 1 for an unknown dtype."""
    return _ITEMSIZE.get(dtype.removeprefix("torch."), 1)


def _bytes(record: CallRecord) -> int:
    shapes = record.input_shapes or record.output_shapes
    if not shapes or not record.dtypes:
        return record.nbytes
    return sum(prod(s) for s in shapes) * itemsize(record.dtypes[0])


def same_call(a: CallRecord, b: CallRecord) -> bool:
    """Return whether all arguments that must be equal on every rank are equal."""
    return (
        a.op == b.op
        and a.input_shapes == b.input_shapes
        and a.dtypes == b.dtypes
        and a.reduce_op == b.reduce_op
        and a.root == b.root
        and a.input_splits == b.input_splits
        and a.output_splits == b.output_splits
        and a.new_ranks == b.new_ranks
    )


def sizes(op: str, ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]) -> Difference | None:
    if op in ("all_to_all", "all_to_all_single"):
        return _all_to_all(ordered)
    if op in ("scatter", "gather", "all_gather"):
        return _lists(ordered, are_read=op == "scatter")
    lists = op == "reduce_scatter" and any(len(r.input_shapes) > 1 for r in ordered)
    if lists and (result := _lists(ordered, are_read=True)):
        return result
    values: dict[int, Hashable] = {}
    for record in ordered:
        shapes = record.input_shapes or record.output_shapes
        if op == "broadcast":  # only the number of elements matters
            values[record.rank] = tuple(prod(s) for s in shapes)
        else:
            values[record.rank] = tuple(tuple(n for n in s if n != 1) for s in shapes)
    return differ(Kind.SHAPE_MISMATCH, ordered, values, texts(ordered), histories)


def _lists(ordered: Sequence[CallRecord], are_read: bool) -> Difference | None:
    """Check that item j of each rank's tensor list, which the call reads or writes, is as large as the tensor of group
    rank j.
    """

    def lists(record: CallRecord) -> tuple[Shape, ...]:
        return record.input_shapes if are_read else record.output_shapes

    def item(record: CallRecord) -> Shape | None:
        shapes = record.output_shapes if are_read else record.input_shapes
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
        return Kind.SHAPE_MISMATCH, vote, _texts_of_lists(ordered, vote)
    values: dict[int, Hashable] = {r.rank: prod(at) for r in ordered if (at := item(r)) is not None}
    return differ(Kind.SHAPE_MISMATCH, ordered, values, texts(ordered), {})


def _texts_of_lists(ordered: Sequence[CallRecord], vote: Vote) -> dict[int, str]:
    """Return the payload of each rank: its inputs, and also its outputs if the inputs do not show the difference."""
    says = texts(ordered)
    if {says[rank] for rank in vote.culprits}.isdisjoint(says[rank] for rank in vote.reference):
        return says
    outputs = texts([replace(r, input_shapes=()) for r in ordered])
    return {r.rank: f"{says[r.rank]} into {outputs[r.rank]}" if r.output_shapes else says[r.rank] for r in ordered}


def _all_to_all(ordered: Sequence[CallRecord]) -> Difference | None:
    """Check that rank i's input split j equals rank j's output split i."""
    conflicts = split_conflicts(ordered)
    if not conflicts:
        return None
    says = {r.rank: f"sends {_brief(r.input_splits)}, expects {_brief(r.output_splits)}" for r in ordered}
    given = any(r.input_splits or r.output_splits for r in ordered)
    kind = Kind.SPLITS_MISMATCH if given else Kind.SHAPE_MISMATCH
    if not given:
        says = texts(ordered)
    pairs = [(c.sender, c.receiver) for c in conflicts]
    return kind, blame_conflicts(tuple(r.rank for r in ordered), pairs, odd=_irregular(ordered)), says


@dataclass(frozen=True, slots=True)
class SplitConflict:
    """Two ranks that disagree about the number of elements that one sends to the other."""

    sender: int
    receiver: int
    sent: int
    expected: int


def split_conflicts(ordered: Sequence[CallRecord]) -> list[SplitConflict]:
    """Return the pairs of ranks of an all_to_all whose splits contradict each other, by sender and receiver."""
    group = ordered[0].group.ranks
    sends = {r.rank: s for r in ordered if (s := _splits(r, len(group), r.input_splits, r.input_shapes)) is not None}
    takes = {r.rank: s for r in ordered if (s := _splits(r, len(group), r.output_splits, r.output_shapes)) is not None}
    if sends.keys() == takes.keys() == set(group):  # all there: compare whole columns at once
        columns = zip(*(sends[rank] for rank in group), strict=True)
        if all(column == takes[rank] for rank, column in zip(group, columns, strict=True)):
            return []
    return [
        SplitConflict(a, b, sends[a][j], takes[b][i])
        for i, a in enumerate(group)
        if a in sends
        for j, b in enumerate(group)
        if b in takes and sends[a][j] != takes[b][i]
    ]


def _brief(splits: tuple[int, ...] | None, most: int = 8) -> str:
    if not splits:
        return "equal shares"
    return f"[{', '.join(map(str, splits[:most]))}{', ...' if len(splits) > most else ''}]"


def _irregular(ordered: Sequence[CallRecord]) -> frozenset[int]:
    """Return ranks whose splits differ from those of most."""
    alike: dict[Hashable, list[int]] = {}
    for r in ordered:
        alike.setdefault((r.input_shapes, r.input_splits, r.output_shapes, r.output_splits), []).append(r.rank)
    most = max(alike.values(), key=len)
    if len(most) * 2 <= len(ordered):
        return frozenset()
    return frozenset(r.rank for r in ordered if r.rank not in most)


def _splits(
    record: CallRecord, num_ranks: int, splits: tuple[int, ...] | None, shapes: tuple[Shape, ...]
) -> tuple[int, ...] | None:
    """Return the elements for (or from) each group rank; None if the record does not have them."""
    if not num_ranks:
        return None
    if record.op == "all_to_all":
        return tuple(prod(s) for s in shapes) if len(shapes) == num_ranks else None
    if len(shapes) != 1:
        return tuple(splits) if splits and len(splits) == num_ranks else None
    rows, row = (shapes[0][0], prod(shapes[0][1:])) if shapes[0] else (1, 1)
    if not splits:
        return (rows // num_ranks * row,) * num_ranks if rows % num_ranks == 0 else None
    return tuple(n * row for n in splits) if len(splits) == num_ranks else None


def differ(
    kind: Kind,
    ordered: Sequence[CallRecord],
    values: Mapping[int, Hashable],
    says: Mapping[int, str],
    histories: Mapping[int, Sequence[CallRecord]],
) -> Difference | None:
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
    """Settle a tie: the culprits are the ranks that left their habit at this line, if the other ranks kept theirs."""
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


def payload_text(record: CallRecord) -> str:
    """Return dtype and shapes, such as `float32[4,8]`; lists are cut after three tensors."""
    shapes = record.input_shapes or record.output_shapes
    dtype = record.dtypes[0] if record.dtypes else ""
    if not shapes:
        return dtype or (f"{record.nbytes} B" if record.nbytes else "no tensor")
    texts = [f"{dtype}[{','.join(map(str, s))}]" for s in shapes[:3]]
    more = f", ... {len(shapes)} in all" if len(shapes) > 3 else ""
    return ", ".join(texts) + more


def texts(ordered: Sequence[CallRecord]) -> dict[int, str]:
    return {r.rank: payload_text(r) for r in ordered}


@dataclass(frozen=True, slots=True)
class Vote:
    """Ranks that agree, ranks that do not, and whether a majority decided."""

    reference: tuple[int, ...]
    culprits: tuple[int, ...]
    tie: bool


def majority(values: Mapping[int, Hashable]) -> Vote:
    """Return the vote of *values*, in which the largest side is the reference. *values* are in group-rank order.

    Two sides of equal size are a tie: the side with the lowest group rank is then the reference by convention, and
    `Vote.tie` is set.
    """
    sides: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    largest = max(len(side) for side in sides.values())
    leaders = [value for value, side in sides.items() if len(side) == largest]
    reference = sides[leaders[0]]
    culprits = tuple(sorted(rank for value, side in sides.items() if value != leaders[0] for rank in side))
    return Vote(tuple(reference), culprits, tie=len(leaders) > 1)


def blame_conflicts(
    ranks: Sequence[int],
    conflicts: Sequence[tuple[int, int]],
    innocent: int | None = None,
    odd: Collection[int] = (),
) -> Vote:
    """Return the fewest ranks whose removal leaves no two that contradict each other (found greedily).

    Of two that contradict each other equally often, the *odd* one is blamed. A rank that contradicts itself is
    always blamed. *innocent* (a root whose list is the reference) is blamed only if it contradicts at least half of
    the others.
    """
    left = list(dict.fromkeys(conflicts))
    culprits: list[int] = []
    tie = False
    while left:
        counts = dict.fromkeys(ranks, 0)
        for a, b in left:
            counts[a] += 1
            if a != b:
                counts[b] += 1
            else:
                counts[a] += len(ranks)
        if innocent is not None and counts.get(innocent, 0) * 2 <= len(ranks):
            counts[innocent] = 0
        most = max(counts.values())
        leaders = [rank for rank in ranks if counts[rank] == most]
        leaders = [rank for rank in leaders if rank in odd] or leaders
        tie = tie or any(a != b and a in leaders and b in leaders for a, b in left)
        worst = leaders[-1]
        culprits.append(worst)
        left = [pair for pair in left if worst not in pair]
    return Vote(tuple(r for r in ranks if r not in culprits), tuple(sorted(culprits)), tie)
