"""Where did a rank leave the common order, and how: a call skipped, added, swapped, or another one?

The calls of a rank from the point of divergence are laid beside the majority's, under each
hypothesis in turn; the hypothesis that the most calls bear out wins. Where a group's future is
not recorded (everybody is blocked), earlier rounds of the same loop predict it, and where there
was no earlier round the program's text decides (`source.relate`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from distsim.debug.checks import Mismatch, check_meeting, same_call
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, Phase, State
from distsim.debug.source import Order, Relation, relate
from distsim.debug.vote import Vote, majority
from distsim.debug.world import Lane, World

__all__ = ["Divergence", "find_divergences"]

HORIZON = 12
"""Calls laid beside each other after a divergence: more only repeats the loop."""

SHIFTS = frozenset({Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, Kind.UNEVEN_ITERATIONS})
"""Every later call of the group is paired with a wrong one."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first number at which the members of a group are not in the same call."""

    kind: Kind
    lane: Lane
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

    @property
    def blocks(self) -> bool:
        """Later calls of the group can not be trusted, or somebody is still in this one."""
        met = self.lane.meetings[self.seq].values()
        return self.kind in SHIFTS or any(r.state is not State.COMPLETED for r in met)


def find_divergences(world: World, lane: Lane) -> list[Divergence]:
    """The contradictions among the calls of one group, up to the first that nobody gets past.

    One that did no visible harm (a reduce op that differs) is told once, however often it comes.
    """
    found: list[Divergence] = []
    unlike_sites: list[int] = []
    for seq in sorted(lane.meetings):
        met = lane.meetings[seq]
        if len(met) < 2:
            continue
        records = list(met.values())
        first = records[0]
        if not all(same_call(first, r) for r in records):
            rest = first.op.startswith("all_to_all") and all(r.state is State.COMPLETED for r in records)
            mismatch = None if rest else check_meeting(records, lane.calls)
            if mismatch is not None:
                divergence = _classify(world, lane, mismatch)
                if not any(d.kind is divergence.kind and d.culprits == divergence.culprits for d in found):
                    found.append(divergence)
                if divergence.blocks:
                    break
                continue
        site = first.site
        if site is not None and any(r.site is not site and r.site != site for r in records):
            unlike_sites.append(seq)
    for seq in unlike_sites:
        if (silent := _by_site(world, lane, seq)) is not None:
            found.append(silent)
            break
    found.sort(key=lambda d: d.seq)
    first_block = next((i for i, d in enumerate(found) if d.blocks), len(found))
    return found[: first_block + 1]


# --- hypotheses ------------------------------------------------------------------------------------


def _signature(record: CallRecord) -> Hashable:
    """What every rank must have alike; shapes may differ between ranks where lists or splits do."""
    varies = record.op in ("all_gather", "gather", "scatter", "all_to_all", "all_to_all_single")
    return (record.op, None if varies else record.input_shapes, record.dtypes, record.reduce_op, record.root)


def _likeness(a: CallRecord, b: CallRecord) -> int:
    """0 not the same call, 1 the same but for its line, 2 the same line as well."""
    if _signature(a) != _signature(b):
        return 0
    return 2 if a.site is not None and a.site == b.site else 1


def _support(mine: Sequence[CallRecord], theirs: Sequence[CallRecord], least: int) -> int | None:
    """How well two stretches agree; None where they contradict each other."""
    total = 0
    for a, b in zip(mine[:HORIZON], theirs[:HORIZON], strict=False):
        like = _likeness(a, b)
        if like < least:
            return None
        total += like
    return total


def _permuted(mine: Sequence[CallRecord], theirs: Sequence[CallRecord], least: int) -> int | None:
    for k in range(2, min(len(mine), len(theirs), 8) + 1):
        a = [(_signature(r), r.site if least == 2 else None) for r in mine[:k]]
        b = [(_signature(r), r.site if least == 2 else None) for r in theirs[:k]]
        if a != b and Counter(a) == Counter(b):
            rest = _support(mine[k:], theirs[k:], least)
            if rest is not None:
                return 2 * k + rest
    return None


def _hypotheses(
    mine: Sequence[CallRecord], theirs: Sequence[CallRecord], least: int
) -> list[tuple[int, Kind]]:
    """Every way the two stretches can be explained, the best supported first; where several are
    supported alike, the one that explains why one of them is longer."""
    longer = len(mine) - len(theirs)
    scored: list[tuple[int, bool, Kind]] = []
    if (score := _permuted(mine, theirs, least)) is not None:
        scored.append((score, longer == 0, Kind.WRONG_ORDER))
    for k in (1, 2, 3):
        if len(theirs) > k and (score := _support(mine, theirs[k:], least)):
            scored.append((score, longer == -k, Kind.MISSING_RANK))
        if len(mine) > k and (score := _support(mine[k:], theirs, least)):
            scored.append((score, longer == k, Kind.EXTRA_COLLECTIVE))
    if least < 2:
        score = _support(mine[1:], theirs[1:], least) or 0
        same_line = mine[0].site is not None and mine[0].site == theirs[0].site
        scored.append((score + same_line, longer == 0, Kind.OP_MISMATCH))
    scored.sort(key=lambda s: (-s[0], not s[1]))
    return [(score, kind) for score, _, kind in scored]


def _from(lane: Lane, rank: int, seq: int) -> list[CallRecord]:
    """The rank's calls on this group from *seq* on, as far as they are worth a look."""
    calls = lane.calls.get(rank, [])
    start = next((i for i, r in enumerate(calls) if r.seq >= seq), len(calls))
    return calls[start : start + 3 * HORIZON]


def _ahead(lane: Lane, rank: int, seq: int) -> list[CallRecord]:
    """The rank's calls from *seq* on, continued with what followed this call in its past."""
    calls = lane.calls.get(rank, [])
    ahead = [r for r in calls if r.seq >= seq]
    past = [r for r in calls if r.seq < seq]
    if not ahead or not past:
        return ahead
    tail = ahead[-1]
    whole = past + ahead
    best, best_context = None, 0
    for at in range(len(past) - 2, max(-1, len(past) - 513), -1):
        if _likeness(whole[at], tail) < 2:
            continue
        context = 1
        while context < 16 and at - context >= 0 and _likeness(whole[at - context], whole[-1 - context]) == 2:
            context += 1
        if context > best_context:
            best, best_context = at, context
    if best is not None:
        ahead = ahead + whole[best + 1 : best + 1 + HORIZON]
    return ahead


# --- a contradiction that everybody sees ------------------------------------------------------------


def _classify(world: World, lane: Lane, mismatch: Mismatch) -> Divergence:
    """A mismatch is what is seen; a skipped or added call is why."""
    culprit, witness = mismatch.culprits[0], (mismatch.reference or mismatch.culprits)[0]
    mine, theirs = mismatch.records[culprit], mismatch.records[witness]
    found = Divergence(
        kind=mismatch.kind,
        lane=lane,
        seq=mismatch.seq,
        culprits=mismatch.culprits,
        reference=mismatch.reference,
        expected=theirs,
        got=mine,
        tie=mismatch.tie,
        mismatch=mismatch,
    )
    if "new_group" in (mine.op, theirs.op):
        culprits, reference = _creators(mismatch)
        kind = Kind.GROUP_CREATION_ORDER
        if culprits != mismatch.culprits or mine.op != theirs.op:
            met = mismatch.records
            found = replace(found, tie=False, expected=met[reference[0]], got=met[culprits[0]])
        return replace(found, kind=kind, culprits=culprits, reference=reference)
    relation = relate(mine, theirs, world.evidence.sources)
    found = replace(found, relation=relation)
    mine_ahead, theirs_ahead = _from(lane, culprit, mismatch.seq), _from(lane, witness, mismatch.seq)
    real = _hypotheses(mine_ahead, theirs_ahead, least=1)
    if real[0][0] < 2:
        real = _hypotheses(mine_ahead, _ahead(lane, witness, mismatch.seq), least=1)
    score, kind = real[0]
    if score >= 2 and kind is not Kind.OP_MISMATCH:
        if kind is Kind.WRONG_ORDER and _threads_raced(lane, culprit, witness, mismatch.seq):
            kind = Kind.THREAD_RACE
        return replace(found, kind=kind)
    if score >= 2:
        return found
    return replace(found, kind=_by_text(lane, mine, theirs, relation) or found.kind)


def _creators(mismatch: Mismatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """new_group against something else: who did not call it is the culprit, however many they are."""
    records = mismatch.records
    creating = tuple(sorted(rank for rank, r in records.items() if r.op == "new_group"))
    if len(creating) == len(records):
        return mismatch.culprits, mismatch.reference
    return tuple(sorted(set(records) - set(creating))), creating


def _called_before(lane: Lane, record: CallRecord, by: int) -> bool:
    return record.site is not None and any(
        r.seq < record.seq and r.site == record.site and r.op == record.op for r in lane.calls.get(by, ())
    )


def _by_text(lane: Lane, mine: CallRecord, theirs: CallRecord, relation: Relation) -> Kind | None:
    """No later call tells: loops that the two have been round, then the program's text."""
    mine_is_new = not _called_before(lane, mine, theirs.rank)
    theirs_is_new = not _called_before(lane, theirs, mine.rank)
    left_loop = mine_is_new and not theirs_is_new and relation.order is Order.AFTER
    if left_loop and (relation.left_loop or not relation.certain):
        return Kind.UNEVEN_ITERATIONS  # it has left the loop, they have not
    stayed = theirs_is_new and not mine_is_new and relation.order is Order.BEFORE
    if stayed and (relation.still_in_loop or not relation.certain):
        return Kind.UNEVEN_ITERATIONS  # it goes round once more
    if not relation.certain:
        return None
    if relation.order is Order.EXCLUSIVE:
        return Kind.WRONG_ORDER if relation.swapped else None
    if relation.order is Order.AFTER:
        return Kind.MISSING_RANK
    if relation.order is Order.BEFORE:
        if relation.my_guard is not None:
            return Kind.EXTRA_COLLECTIVE
        if not mine_is_new:
            return Kind.MISSING_RANK  # it is in the next round already
    return None


def _threads_raced(lane: Lane, culprit: int, witness: int, seq: int) -> bool:
    """Each thread of the culprit kept its own order; only how they interleave differs."""
    mine = [r for r in lane.calls[culprit] if r.seq >= seq][:HORIZON]
    theirs = [r for r in lane.calls[witness] if r.seq >= seq][:HORIZON]
    threads = {r.thread for r in mine}
    if len(threads) < 2:
        return False
    size = min(len(mine), len(theirs))
    for thread in sorted(threads):
        own = [_signature(r) for r in mine[:size] if r.thread == thread]
        other = [_signature(r) for r in theirs[:size] if r.thread == thread]
        if own != other:
            return False
    return True


# --- a contradiction that only the call sites show --------------------------------------------------


def _by_site(world: World, lane: Lane, seq: int) -> Divergence | None:
    """The calls look alike, but a rank makes them at lines that the others use for other calls.

    Ranks may legally call from different lines (`if rank == 0: ... else: ...`). So a rank is
    named only if its lines are the majority's lines, skipped, repeated or swapped, and its own
    past does not explain it.
    """
    met = lane.meetings[seq]
    sites: dict[int, Hashable] = {
        rank: met[rank].site for rank in lane.group.ranks if rank in met and met[rank].site
    }
    if len(set(sites.values())) < 2:
        return None
    vote = majority(sites)
    culprits: list[int] = []
    kinds: Counter[Kind] = Counter()
    witness = vote.reference[0]
    theirs = _common(lane, vote.reference, seq)
    for rank in vote.culprits:
        mine = _from(lane, rank, seq)
        kind = _silent_kind(world, lane, mine, theirs)
        if kind is not None:
            culprits.append(rank)
            kinds[kind] += 1
    if not culprits:
        return None
    kind = kinds.most_common(1)[0][0]
    if vote.tie:
        settled = _settle_by_past(lane, vote, seq)
        if settled is not None:
            vote = settled
            culprits = list(vote.culprits)
            witness = vote.reference[0]
        elif kind not in SHIFTS:
            return None
    if kind is Kind.WRONG_ORDER and _threads_raced_by_site(lane, culprits[0], witness, seq):
        kind = Kind.THREAD_RACE
    return Divergence(
        kind=kind,
        lane=lane,
        seq=seq,
        culprits=tuple(culprits),
        reference=vote.reference,
        expected=met[witness],
        got=met[culprits[0]],
        tie=vote.tie,
        relation=relate(met[culprits[0]], met[witness], world.evidence.sources),
    )


def _common(lane: Lane, ranks: Sequence[int], seq: int) -> list[CallRecord]:
    """What all of *ranks* do from *seq* on, as long as most of the group does it at one line."""
    common: list[CallRecord] = []
    for at in range(seq, seq + HORIZON):
        met = lane.meetings.get(at, {})
        if not met:
            break
        sites = Counter(r.site for r in met.values())
        site, votes = sites.most_common(1)[0]
        agreed = [met[r] for r in ranks if r in met and met[r].site == site]
        if votes * 2 < len(met) or len(agreed) * 2 <= len(ranks):
            break
        common.append(agreed[0])
    return common


def _silent_kind(
    world: World, lane: Lane, mine: Sequence[CallRecord], theirs: Sequence[CallRecord]
) -> Kind | None:
    if not mine or not theirs:
        return None
    relation = relate(mine[0], theirs[0], world.evidence.sources)
    if relation.order is Order.EXCLUSIVE and not relation.swapped:
        return None  # two branches of one decision: legal
    scored = _hypotheses(mine, theirs, least=2)
    if not scored or scored[0][0] < 2:
        return None
    kind = scored[0][1]
    if kind is not Kind.WRONG_ORDER and not _ends_short(world, lane, mine[0].rank, theirs[0].rank):
        return None
    return kind


def _ends_short(world: World, lane: Lane, one: int, other: int) -> bool:
    """A shift must leave one of them short in the end; a rank that still runs is only behind."""
    mine, theirs = lane.calls[one][-1], lane.calls[other][-1]
    if mine.seq == theirs.seq:
        return mine.site != theirs.site and not (mine.done and theirs.done)
    behind = one if mine.seq < theirs.seq else other
    return world.states[behind].phase in (Phase.FINISHED, Phase.BLOCKED)


def _settle_by_past(lane: Lane, vote: Vote, seq: int) -> Vote | None:
    """As many here as there: only a rank that breaks its own habit can be named."""
    strayed = []
    for rank in (*vote.reference, *vote.culprits):
        calls = lane.calls[rank]
        here = next(r for r in calls if r.seq == seq)
        before = [r for r in calls if r.seq < seq]
        if not before:
            continue
        previous = before[-1]
        followers = [b.site for a, b in itertools.pairwise(before) if a.site == previous.site]
        if followers and here.site not in followers:
            strayed.append(rank)
    everyone = sorted((*vote.reference, *vote.culprits))
    if not strayed or len(strayed) * 2 > len(everyone):
        return None
    return Vote(tuple(r for r in everyone if r not in strayed), tuple(sorted(strayed)), tie=False)


def _threads_raced_by_site(lane: Lane, culprit: int, witness: int, seq: int) -> bool:
    mine = [r for r in lane.calls[culprit] if r.seq >= seq][:HORIZON]
    theirs = [r for r in lane.calls[witness] if r.seq >= seq][:HORIZON]
    size = min(len(mine), len(theirs))
    threads = sorted({r.thread for r in mine[:size]})
    return len(threads) > 1 and all(
        [r.site for r in mine[:size] if r.thread == t] == [r.site for r in theirs[:size] if r.thread == t]
        for t in threads
    )
