"""What a rank usually does between two calls, from its own past and from the ranks that do the same.

A rank at call B that others await in call A either left A out, or is not there yet. If it used to
make A between any two B, or if everybody who makes both makes A first, it left A out.
"""

from __future__ import annotations

from collections.abc import Collection

from distsim.debug.divergence.source_order import Order, relate
from distsim.debug.matching.index import EvidenceIndex, GroupCalls
from distsim.debug.records import CallRecord

__all__ = ["is_usual", "left_out", "usual_in_sisters"]

WITNESSES = 32
"""Ranks asked for the order of two calls at most: what more would say is the same."""

LOCKSTEP = 3
"""Calls that groups of one dimension must have made alike before one is a witness for the other."""


def left_out(index: EvidenceIndex, awaited: CallRecord, call: CallRecord, *, by_past: bool = False) -> bool:
    """The rank of *call* went past *awaited* without making it; *by_past*: as its own past alone says."""
    if awaited.site is None or call.site is None or awaited.way == call.way:
        return False
    own = _marks(index, call.rank, awaited, call, before=call)
    if "B" in own:
        first, *between, now = own.split("B")  # what stood between calls of B
        used_to = all("A" in piece for piece in between) if between else "A" in first
        return used_to and "A" not in now
    if "A" in own or by_past:
        return False
    relation = relate(call, awaited, index.evidence.sources)
    if relation.certain and relation.order is not Order.SAME:
        return relation.order is Order.AFTER
    return _usual_order(index, awaited, call) == "AB"


def is_usual(index: EvidenceIndex, call: CallRecord, but: Collection[int] = ()) -> bool:
    """Somebody else makes exactly this call at this line: it is no odd version of another.
    *but*: ranks whose word does not count."""
    return call.site is not None and any(
        record is not call and record.way == call.way and _alike(record, call)
        for rank in index.states
        if rank not in but
        for record in index.records(rank)
    )


def usual_in_sisters(
    index: EvidenceIndex, log: GroupCalls, seq: int, one: CallRecord, other: CallRecord
) -> bool | None:
    """Whether the other groups of a mesh's dimension made *one* at this number (True), or *other* (False).

    A sister has the name and the size of *log* and other members, and has made the same calls up to *seq*: at least
    `LOCKSTEP` of them. None where there is no sister, or where they do not agree.
    """
    votes: set[bool] = set()
    for sister in index.group_logs:
        if sister is log or not _sisters(log, sister):
            continue
        met = list(sister.meetings.get(seq, {}).values())
        alike = [n for n in log.meetings if n < seq and n in sister.meetings]
        if not met or len(alike) < LOCKSTEP or any(not _ways(sister, n) <= _ways(log, n) for n in alike):
            continue
        ways = {(r.way, r.op) for r in met}
        if ways <= {(one.way, one.op)}:
            votes.add(True)
        elif ways <= {(other.way, other.op)}:
            votes.add(False)
        else:
            return None
    return votes.pop() if len(votes) == 1 else None


def _sisters(a: GroupCalls, b: GroupCalls) -> bool:
    first, second = a.group, b.group
    named = first.description not in ("", "undefined") and first.description == second.description
    return named and len(first.ranks) == len(second.ranks) and not set(first.ranks) & set(second.ranks)


def _ways(log: GroupCalls, seq: int) -> set[tuple[object, str]]:
    return {(record.way, record.op) for record in log.meetings[seq].values()}


def _alike(a: CallRecord, b: CallRecord) -> bool:
    return (a.op, a.input_shapes, a.dtypes, a.reduce_op) == (b.op, b.input_shapes, b.dtypes, b.reduce_op)


def _usual_order(index: EvidenceIndex, awaited: CallRecord, call: CallRecord) -> str | None:
    """`"AB"` where ranks that make both make *awaited* first, `"BA"` the other way round."""
    looked_at = 0
    orders: dict[str, int] = {}
    for rank in index.states:
        if rank == call.rank or index.truncated(rank):
            continue
        marks = _marks(index, rank, awaited, call)
        if "A" in marks and "B" in marks:
            order = "AB" if marks.index("A") < marks.index("B") else "BA"
            orders[order] = orders.get(order, 0) + 1
            looked_at += 1
            if looked_at >= WITNESSES:
                break
    return max(orders, key=lambda o: orders[o]) if len(orders) == 1 else None


def _marks(
    index: EvidenceIndex, rank: int, awaited: CallRecord, call: CallRecord, before: CallRecord | None = None
) -> str:
    """The calls at the two lines as a word of A and B, up to *before*. A rank may make A at a line of
    its own (`if rank == 0: ... else: ...`): what met the awaited rank's A is an A."""
    log = index.group_log(awaited)
    marks: list[str] = []
    for record in index.records(rank):
        if record is before:
            break
        if record.way == call.way and record.op == call.op:
            marks.append("B")
        elif record.op == awaited.op and (record.way == awaited.way or _met_at(log, record, awaited)):
            marks.append("A")
    return "".join(marks)


def _met_at(log: GroupCalls | None, record: CallRecord, awaited: CallRecord) -> bool:
    if log is None or record.group != awaited.group:
        return False
    other = log.meetings.get(record.seq, {}).get(awaited.rank)
    return other is not None and other is not awaited and other.way == awaited.way
