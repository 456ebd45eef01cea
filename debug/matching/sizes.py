"""What each operation demands of its tensors' sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from distsim.debug.matching.aspect import Found, Shape, differ, texts
from distsim.debug.matching.majority import blame_conflicts
from distsim.debug.records import CallRecord
from distsim.debug.records.kinds import Kind

__all__ = ["SplitConflict", "sizes", "split_conflicts"]


def sizes(op: str, ordered: Sequence[CallRecord], histories: Mapping[int, Sequence[CallRecord]]) -> Found | None:
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
    if found := differ(Kind.SHAPE_MISMATCH, ordered, values, texts(ordered), histories):
        return found
    return None


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
        return Kind.SHAPE_MISMATCH, vote, texts(ordered)
    values: dict[int, Hashable] = {r.rank: prod(at) for r in ordered if (at := item(r)) is not None}
    return differ(Kind.SHAPE_MISMATCH, ordered, values, texts(ordered), {})


def _all_to_all(ordered: Sequence[CallRecord]) -> Found | None:
    """What i sends to j is what j expects from i: rank i's input split j == rank j's output split i."""
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
    """Two ranks that do not agree about what one sends to the other, in elements."""

    sender: int
    receiver: int
    sent: int
    expected: int


def split_conflicts(ordered: Sequence[CallRecord]) -> list[SplitConflict]:
    """The pairs of an all_to_all that contradict each other, by sender and receiver."""
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
    """Where most ranks split alike: those that do not."""
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
    """Elements for (or from) each group rank; None where the record does not tell."""
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
