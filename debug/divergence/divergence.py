"""The first call number at which the members of a group make different calls, and hypotheses about the cause.

The calls of two ranks from that number on are compared under each hypothesis in turn. Evidence comes from what a
rank usually does between two calls. Suppose a rank is at call B while others wait in call A: either it left A out,
or it has not reached A yet. If it used to make A between any two B, or if every rank that makes both makes A first,
it left A out. A call that torch refused at its own rank, and that the rank did not repeat, moves all later calls of
the rank one number forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from distsim.debug.divergence.source_order import Order, Relation, relate
from distsim.debug.matching.agreement import Mismatch
from distsim.debug.matching.index import EvidenceIndex, GroupCalls
from distsim.debug.messages import ranks_text, site_text
from distsim.debug.records import CallRecord, State
from distsim.debug.records.call import was_refused
from distsim.debug.records.kinds import Kind

SHIFTS = frozenset({Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, Kind.UNEVEN_ITERATIONS})
"""Kinds after which every later call of the group is paired with a wrong one."""
HORIZON = 12
"""Number of calls after a divergence that are compared; more would only repeat the loop."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """First call number at which the members of a group make different calls."""

    kind: Kind
    group_log: GroupCalls
    seq: int
    culprits: tuple[int, ...]
    reference: tuple[int, ...]
    expected: CallRecord
    """The reference's call."""
    got: CallRecord
    """The first culprit's call."""
    tie: bool
    mismatch: Mismatch | None = None
    relation: Relation | None = None
    borne_out: bool = False
    """Whether only the lines of the calls differ, but later calls of the group do contradict each other."""
    refused: CallRecord | None = None
    """Call of the first culprit that torch refused, and that is therefore missing."""

    @property
    def met(self) -> bool:
        """Return whether calls that met contradict each other; otherwise they agree, and only their lines differ."""
        return self.mismatch is not None or self.borne_out

    @property
    def blocks(self) -> bool:
        """Return whether later calls of the group cannot be trusted, or a rank is still in this one."""
        met = self.group_log.meetings[self.seq].values()
        return self.kind in SHIFTS or any(r.state is not State.COMPLETED for r in met)


def signature(record: CallRecord) -> Hashable:
    """Return the part of a call that must be equal on all ranks; shapes may differ for lists or splits."""
    varies = record.op in ("all_gather", "gather", "scatter", "all_to_all", "all_to_all_single")
    return (record.op, None if varies else record.input_shapes, record.dtypes, record.reduce_op, record.root)


def likeness(a: CallRecord, b: CallRecord, exact: bool = False) -> int:
    """Return 0 if the calls differ, 1 if they differ only in their line, 2 if they are equal.

    With *exact*, shapes are always compared.
    """
    if signature(a) != signature(b) or (exact and a.input_shapes != b.input_shapes):
        return 0
    return 2 if a.site is not None and a.way == b.way else 1


def support(mine: Sequence[CallRecord], others: Sequence[CallRecord], least: int, exact: bool) -> int | None:
    """Return how well two stretches of calls agree; None if they contradict each other."""
    total = 0
    for a, b in zip(mine[:HORIZON], others[:HORIZON], strict=False):
        like = likeness(a, b, exact)
        if like < least:
            return None
        total += like
    return total


def permuted(mine: Sequence[CallRecord], others: Sequence[CallRecord], least: int) -> int | None:
    """Return how well the same calls in another order explain two stretches, counted like `support`."""
    for k in range(2, min(len(mine), len(others), 8) + 1):
        a = [(signature(r), r.way if least == 2 else None) for r in mine[:k]]
        b = [(signature(r), r.way if least == 2 else None) for r in others[:k]]
        if a != b and Counter(a) == Counter(b):
            rest = support(mine[k:], others[k:], least, exact=False)
            if rest is not None:
                shared = Counter(r.way for r in mine[:k]) & Counter(r.way for r in others[:k])
                return k + shared.total() + rest
    return None


def hypotheses(mine: Sequence[CallRecord], others: Sequence[CallRecord], least: int) -> list[tuple[int, Kind]]:
    """Return every explanation of the two sequences, the best supported first.

    Of equally supported ones, the explanation of why one sequence is longer comes first.
    """
    longer = len(mine) - len(others)
    # Two calls of one line that no signature tells apart differ in their shapes, and so may all that follow:
    # which of them is which, only shapes tell.
    exact = bool(mine and others) and likeness(mine[0], others[0]) == 2
    scored: list[tuple[int, bool, Kind]] = []
    if (score := permuted(mine, others, least)) is not None:
        scored.append((score, longer == 0, Kind.WRONG_ORDER))
    for k in (1, 2, 3):
        if len(others) > k and (score := support(mine, others[k:], least, exact)):
            scored.append((score, longer == -k, Kind.MISSING_RANK))
        if len(mine) > k and (score := support(mine[k:], others, least, exact)):
            scored.append((score, longer == k, Kind.EXTRA_COLLECTIVE))
    if least < 2:
        score = support(mine[1:], others[1:], least, exact=False) or 0
        same_line = bool(mine and others) and mine[0].site is not None and mine[0].site == others[0].site
        scored.append((score + same_line, longer == 0, Kind.OP_MISMATCH))
    scored.sort(key=lambda s: (-s[0], not s[1]))
    return [(score, kind) for score, _, kind in scored]


def earlier_shift(log: GroupCalls, rank: int, witness: int, seq: int) -> tuple[int, int, Kind] | None:
    """Return (score, number, kind) of a call before number *seq* that *rank* left out or added, or None.

    Since that call, calls from different lines met that happened to match, until those of *seq* did not. The score
    is the number of calls from *seq* on that support this.
    """
    first = seq
    while first > max(1, seq - HORIZON) and _lines_differ(log, rank, witness, first - 1):
        first -= 1
    candidates: list[tuple[int, int, int, Kind]] = []
    alike = 0  # before the shift
    for start in range(first, seq):
        mine, others = calls_from(log, rank, start), calls_from(log, witness, start)
        for kind, own, other in (
            (Kind.MISSING_RANK, mine, ahead_of(log, witness, start)[1:]),
            (Kind.EXTRA_COLLECTIVE, ahead_of(log, rank, start)[1:], others),
        ):
            fits = support(own, other, 1, exact=False)
            score = min(len(own), len(other), HORIZON) - (seq - start - 1)
            if fits is not None and score >= 2:
                candidates.append((alike + fits, score, start, kind))
        alike += likeness(mine[0], others[0])
    if not candidates:
        return None
    _, score, start, kind = max(candidates, key=lambda c: (c[0], -c[2]))
    return score, start, kind


def _lines_differ(log: GroupCalls, rank: int, witness: int, seq: int) -> bool:
    met = log.meetings.get(seq, {})
    return rank in met and witness in met and met[rank].way != met[witness].way


def calls_from(log: GroupCalls, rank: int, seq: int) -> list[CallRecord]:
    """Return the rank's calls on this group from *seq* on, without those after a call that strict refused.

    These are not part of the program's plan.
    """
    calls = log.calls.get(rank, [])
    start = next((i for i, r in enumerate(calls) if r.seq >= seq), len(calls))
    ahead = calls[start : start + 3 * HORIZON]
    return ahead[: next((i for i, call in enumerate(ahead) if was_refused(call)), len(ahead)) + 1]


def ahead_of(log: GroupCalls, rank: int, seq: int) -> list[CallRecord]:
    """Return the rank's calls from *seq* on, continued by the calls that followed the same call earlier."""
    ahead = calls_from(log, rank, seq)
    past = [r for r in log.calls.get(rank, ()) if r.seq < seq]
    if not ahead or not past:
        return ahead
    tail = ahead[-1]
    whole = past + ahead
    best, best_context = None, 0
    for at in range(len(past) - 2, max(-1, len(past) - 513), -1):
        if likeness(whole[at], tail) < 2:
            continue
        context = 1
        while context < 16 and at - context >= 0 and likeness(whole[at - context], whole[-1 - context]) == 2:
            context += 1
        if context > best_context:
            best, best_context = at, context
    if best is not None:
        ahead = ahead + whole[best + 1 : best + 1 + HORIZON]
    return ahead


def threads_raced(mine: Sequence[CallRecord], others: Sequence[CallRecord], *, by_site: bool) -> bool:
    """Return whether each thread kept its own order of calls and only their interleaving differs."""
    size = min(len(mine), len(others), HORIZON)
    threads = sorted({r.thread for r in mine[:size]})

    def calls(records: Sequence[CallRecord], thread: str) -> list[Hashable]:
        return [r.site if by_site else signature(r) for r in records[:size] if r.thread == thread]

    return len(threads) > 1 and all(calls(mine, t) == calls(others, t) for t in threads)


NEAR = 8
"""Number of calls before a contradiction that are compared side by side."""
MOST_WORDS = 120


def refused_before(index: EvidenceIndex, log: GroupCalls, divergence: Divergence) -> Divergence | None:
    """Return the divergence caused by a refused call before *divergence*, if that explains it, else None.

    With the calls shifted by one number, the rank then makes the same calls as the others.
    """
    for first in index.refused:
        met = log.meetings.get(first.seq, {})
        if first.seq > divergence.seq or not _left_out(log, first) or first.rank not in log.meetings[divergence.seq]:
            continue
        alike = [r for r in index.refused if (r.seq, r.op) == (first.seq, first.op) and _left_out(log, r)]
        culprits = tuple(sorted({r.rank for r in alike}))
        reference = tuple(sorted(r for r, call in met.items() if r not in culprits and call.op == first.op))
        if reference and _explains(log, first.rank, reference[0], first.seq, divergence):
            return replace(
                divergence,
                kind=Kind.MISSING_RANK,
                seq=first.seq,
                culprits=culprits,
                reference=reference,
                expected=met[reference[0]],
                got=met[first.rank],
                tie=False,
                refused=first,
                borne_out=divergence.met,
                mismatch=None,
            )
    return None


def _left_out(log: GroupCalls, refused: CallRecord) -> bool:
    """Return whether it was refused between two calls of the log."""
    if refused.is_p2p or refused.group != log.group:
        return False
    calls = log.calls.get(refused.rank, ())
    after = next((call for call in calls if call.seq >= refused.seq), None)
    before = next((call for call in reversed(calls) if call.seq < refused.seq), None)
    return (
        after is not None
        and after.index > refused.index
        and after.seq == refused.seq
        and (before is None or before.index < refused.index)
    )


def _explains(log: GroupCalls, rank: int, witness: int, seq: int, divergence: Divergence) -> bool:
    """Return whether the rank's calls match the witness's calls shifted by one better than those with equal numbers.

    After a retry, calls with equal numbers match.
    """
    start = max(seq, divergence.seq - NEAR)
    mine = calls_from(log, rank, start)
    shifted = support(mine, calls_from(log, witness, start + 1), 1, exact=False)
    if shifted is None:
        return False
    until = divergence.seq - start
    straight = support(mine[:until], calls_from(log, witness, start)[:until], 1, exact=False) or 0
    one_line = divergence.got.site is not None and divergence.got.way == divergence.expected.way
    return shifted > straight or (shifted == straight and not one_line)


def refused_call(index: EvidenceIndex, call: CallRecord, ranks: Iterable[int]) -> CallRecord | None:
    """Return why *ranks* are not in *call*: a similar call was refused at each of them."""
    absent = set(ranks)
    like = [
        r
        for r in index.refused
        if r.rank in absent
        and (r.op, r.group) == (call.op, call.group)
        and (r.seq == call.seq or (r.way == call.way and r.seq <= call.seq))
    ]
    return like[0] if like and {r.rank for r in like} == absent else None


def refusal_text(refused: CallRecord, ranks: Iterable[int]) -> str:
    """Return a text such as `rank 0's all_gather at train.py:7 was refused by torch with TypeError: ...`."""
    who = list(ranks)
    words = (refused.error or "an exception").partition("\n")[0]
    if len(words) > MOST_WORDS:
        words = words[: MOST_WORDS - 3] + "..."
    whose = f"{ranks_text(who)}'s" if len(who) == 1 else f"of {ranks_text(who)},"
    return f"{whose} {refused.op} at {site_text(refused.site)} was refused by torch with {words.rstrip('.')}"


def refusal_advice(refused: CallRecord) -> str:
    """Return the advice for a refused call."""
    return (
        f"Give the call at {site_text(refused.site)} valid arguments, and do not continue after its exception without "
        "repeating the call: the other ranks wait for it."
    )


WITNESSES = 32
"""Largest number of ranks whose order of two calls is read; more ranks would show the same."""

LOCKSTEP = 3
"""Number of equal calls that groups of one mesh dimension must have made before one serves as evidence for the
other.
"""


def left_out(index: EvidenceIndex, awaited: CallRecord, call: CallRecord, *, by_past: bool = False) -> bool:
    """Return whether the rank of *call* passed *awaited* without making it. With *by_past*, only the rank's own past
    decides.
    """
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
    """Return whether another rank makes exactly this call at this line, so that it is not a faulty variant of
    another call.

    The ranks *but* are ignored.
    """
    return call.site is not None and any(
        record is not call and record.way == call.way and _alike(record, call)
        for rank in index.states
        if rank not in but
        for record in index.records(rank)
    )


def usual_in_sisters(
    index: EvidenceIndex, log: GroupCalls, seq: int, one: CallRecord, other: CallRecord
) -> bool | None:
    """Return whether the other groups of a mesh dimension made *one* (True) or *other* (False) at this number.

    Such a group has the same name and size as *log* and other members, and has made the same calls up to *seq*, at
    least `LOCKSTEP` of them. Return None if there is no such group, or if they disagree.
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
    """Return `"AB"` if ranks that make both calls make *awaited* first, `"BA"` for the opposite order, else None."""
    orders: list[str] = []
    for rank in index.states:
        if rank == call.rank or index.truncated(rank):
            continue
        marks = _marks(index, rank, awaited, call)
        if "A" in marks and "B" in marks:
            orders.append("AB" if marks.index("A") < marks.index("B") else "BA")
            if len(orders) >= WITNESSES:
                break
    return orders[0] if len(set(orders)) == 1 else None


def _marks(
    index: EvidenceIndex, rank: int, awaited: CallRecord, call: CallRecord, before: CallRecord | None = None
) -> str:
    """Return the rank's calls at the two lines, up to *before*, as a string of A and B.

    A rank may make A at a different line (`if rank == 0: ... else: ...`): a call that met the awaited rank's A is an
    A.
    """
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
