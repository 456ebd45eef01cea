"""Contradictions that only the call sites show: every call looks alike, but it is not the same one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise

from distsim.debug.divergence.divergence import SHIFTS, Divergence
from distsim.debug.divergence.realign import HORIZON, calls_from, hypotheses, threads_raced
from distsim.debug.divergence.source_order import Order, relate
from distsim.debug.matching.index import EvidenceIndex, GroupLog
from distsim.debug.matching.majority import Vote, majority
from distsim.debug.records import CallRecord, Phase, State
from distsim.debug.records.kinds import Kind

__all__ = ["by_site"]


def by_site(index: EvidenceIndex, log: GroupLog, seq: int) -> Divergence | None:
    """The calls look alike, but a rank makes them at lines that the others use for other calls.

    Ranks may legally call from different lines (`if rank == 0: ... else: ...`). So a rank is
    named only if its lines are the majority's lines, skipped, repeated or swapped, and its own
    past does not explain it.
    """
    met = log.meetings[seq]
    came = [met[rank] for rank in log.group.ranks if rank in met and met[rank].site]
    # A callback runs at once, on its caller's stack, or later, in a thread of torch's: the line is the same.
    alike = len({call.thread for call in came}) == 1
    sites: dict[int, Hashable] = {call.rank: call.way if alike else call.site for call in came}
    if len(set(sites.values())) < 2:
        return None
    vote = majority(sites)
    culprits: list[int] = []
    kinds: Counter[Kind] = Counter()
    witness = vote.reference[0]
    theirs = _common(log, vote.reference, seq)
    for rank in vote.culprits:
        mine = calls_from(log, rank, seq)
        kind = _silent_kind(index, log, mine, theirs)
        if kind is not None:
            culprits.append(rank)
            kinds[kind] += 1
    if not culprits:
        return None
    kind = kinds.most_common(1)[0][0]
    if vote.tie:
        settled = _settle_by_past(log, vote, seq)
        if settled is not None:
            vote = settled
            culprits = list(vote.culprits)
            witness = vote.reference[0]
            mine, theirs = calls_from(log, culprits[0], seq), calls_from(log, witness, seq)
            kind = _silent_kind(index, log, mine, theirs) or kind
        elif kind not in SHIFTS:
            return None
    if kind is Kind.WRONG_ORDER and threads_raced(
        calls_from(log, culprits[0], seq), calls_from(log, witness, seq), by_site=True
    ):
        kind = Kind.THREAD_RACE
    return Divergence(
        kind=kind,
        group_log=log,
        seq=seq,
        culprits=tuple(culprits),
        reference=vote.reference,
        expected=met[witness],
        got=met[culprits[0]],
        tie=vote.tie,
        relation=relate(met[culprits[0]], met[witness], index.evidence.sources),
    )


def _common(log: GroupLog, ranks: Sequence[int], seq: int) -> list[CallRecord]:
    """What all of *ranks* do from *seq* on, as long as most of the group does it at one line."""
    common: list[CallRecord] = []
    for at in range(seq, seq + HORIZON):
        met = log.meetings.get(at, {})
        if not met:
            break
        sites = Counter(r.way for r in met.values())
        site, votes = sites.most_common(1)[0]
        agreed = [met[r] for r in ranks if r in met and met[r].way == site]
        if votes * 2 < len(met) or len(agreed) * 2 <= len(ranks):
            break
        common.append(agreed[0])
    return common


def _silent_kind(
    index: EvidenceIndex, log: GroupLog, mine: Sequence[CallRecord], theirs: Sequence[CallRecord]
) -> Kind | None:
    if not mine or not theirs:
        return None
    relation = relate(mine[0], theirs[0], index.evidence.sources)
    if relation.order is Order.EXCLUSIVE and _swapped_text(index, mine, theirs):
        return Kind.WRONG_ORDER
    branches = relation.order is Order.EXCLUSIVE and not relation.swapped
    scored = hypotheses(mine, theirs, least=2)
    if not scored or scored[0][0] < 2:
        return None
    kind = scored[0][1]
    if kind is Kind.EXTRA_COLLECTIVE and relation.only_theirs_skipped:
        kind = Kind.MISSING_RANK  # every round makes mine: it is in the next one
    if branches and kind is not Kind.WRONG_ORDER:
        return None  # two branches of one decision: legal, unless they make the same calls in another order
    if kind is not Kind.WRONG_ORDER and not _ends_short(index, log, mine[0].rank, theirs[0].rank):
        return None
    return kind


def _swapped_text(index: EvidenceIndex, mine: Sequence[CallRecord], theirs: Sequence[CallRecord]) -> bool:
    """Lines of two branches that read alike, in another order: `f(b); f(a)` against `f(a); f(b)`."""
    texts = [[_text(index, call) for call in calls[:HORIZON]] for calls in (mine, theirs)]
    for k in range(2, min(map(len, texts)) + 1):
        one, other = texts[0][:k], texts[1][:k]
        if one != other and all(one) and Counter(one) == Counter(other):
            return True
    return False


def _text(index: EvidenceIndex, call: CallRecord) -> str:
    if call.site is None:
        return ""
    lines = _lines(index.evidence.sources.get(call.site.file, ""))
    return lines[call.site.line - 1].partition(" #")[0].strip() if 0 < call.site.line <= len(lines) else ""


@lru_cache(maxsize=64)
def _lines(source: str) -> list[str]:
    return source.splitlines()


def _ends_short(index: EvidenceIndex, log: GroupLog, one: int, other: int) -> bool:
    """A shift must leave one of them short in the end; a rank that still runs is only behind."""
    mine, theirs = log.calls[one][-1], log.calls[other][-1]
    if mine.seq == theirs.seq:
        over = mine.state is State.COMPLETED and theirs.state is State.COMPLETED  # strict ends both without making them
        return (mine.site, mine.op) != (theirs.site, theirs.op) and not over
    behind = one if mine.seq < theirs.seq else other
    return index.states[behind].phase in (Phase.FINISHED, Phase.BLOCKED)


def _settle_by_past(log: GroupLog, vote: Vote, seq: int) -> Vote | None:
    """As many here as there: only a rank that breaks its own habit can be named."""
    strayed = []
    for rank in (*vote.reference, *vote.culprits):
        calls = log.calls[rank]
        here = next(r for r in calls if r.seq == seq)
        before = [r for r in calls if r.seq < seq]
        if not before:
            continue
        previous = before[-1]
        followers = [b.way for a, b in pairwise(before) if a.way == previous.way]
        if followers and here.way not in followers:
            strayed.append(rank)
    everyone = sorted((*vote.reference, *vote.culprits))
    if not strayed or len(strayed) * 2 > len(everyone):
        return None
    return Vote(tuple(r for r in everyone if r not in strayed), tuple(sorted(strayed)), tie=False)
