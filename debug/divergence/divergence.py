"""The first call number at which the members of a group are in different calls, and hypotheses about its cause.

The calls of two ranks from there on are compared under each hypothesis in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from distsim.debug.divergence.source_order import Relation
from distsim.debug.matching.agreement import Mismatch
from distsim.debug.matching.index import GroupCalls
from distsim.debug.records import CallRecord, State
from distsim.debug.records.call import was_refused
from distsim.debug.records.kinds import Kind

__all__ = [
    "HORIZON",
    "SHIFTS",
    "Divergence",
    "ahead_of",
    "calls_from",
    "earlier_shift",
    "hypotheses",
    "signature",
    "threads_raced",
]

SHIFTS = frozenset({Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, Kind.UNEVEN_ITERATIONS})
"""Every later call of the group is paired with a wrong one."""
HORIZON = 12
"""Number of calls after a divergence that are compared; more would only repeat the loop."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first number at which the members of a group are not in the same call."""

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
    """The first culprit's call that torch refused, and that is missing."""

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
    """0 not the same call, 1 the same but for its line, 2 the same line as well. *exact*: shapes always count."""
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
    """A call before number *seq* that *rank* left out or added: since then calls from different lines met that happen
    to fit, until those of *seq* did not. How many calls from *seq* on bear it out, its number, and its kind."""
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
    """The rank's calls from *seq* on, continued with what followed this call in its past."""
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
