"""Finds where a rank left the common order: it skipped, added, swapped or replaced a call.

The calls of a rank from the divergence on are compared with the majority's under each hypothesis in turn; the one
that most calls support wins. If a group's later calls are not recorded (all ranks are blocked), earlier iterations
of the same loop predict them, and without an earlier iteration the program's source decides (`source_order.relate`).

Contradictions that only the call sites show, where calls agree but are different ones, come last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

from distsim.debug.divergence.divergence import (
    HORIZON,
    SHIFTS,
    Divergence,
    ahead_of,
    calls_from,
    earlier_shift,
    hypotheses,
    is_usual,
    left_out,
    refused_before,
    threads_raced,
    usual_in_sisters,
)
from distsim.debug.divergence.source_order import Order, Relation, relate
from distsim.debug.matching.agreement import Mismatch, Vote, check_meeting, majority
from distsim.debug.matching.index import EvidenceIndex, GroupCalls
from distsim.debug.records import CallRecord, Phase, Site, State
from distsim.debug.records.call import line_of
from distsim.debug.records.kinds import Kind

NUMBER = re.compile(r"\d+")
OPPOSITE = {Kind.MISSING_RANK: Kind.EXTRA_COLLECTIVE, Kind.EXTRA_COLLECTIVE: Kind.MISSING_RANK}
"""What a call is that one side left out, if the other side made it too often."""


def find_divergences(index: EvidenceIndex, log: GroupCalls) -> list[Divergence]:
    """Return the contradictions among the calls of one group, up to the first one that blocks all ranks.

    A contradiction without visible effect (a different reduce op) is reported once, however often it occurs.
    """
    divergences: list[Divergence] = []
    unlike_sites: list[int] = []
    for seq in sorted(log.meetings):
        met = log.meetings[seq]
        if len(met) < 2:
            continue
        records = list(met.values())
        first, mismatch = records[0], check_meeting(records, log.calls)
        if mismatch is not None:
            divergence = _fair(index, _classify(index, log, mismatch))
            if not any(d.kind is divergence.kind and d.culprits == divergence.culprits for d in divergences):
                divergences.append(divergence)
            if divergence.blocks:
                break
            continue
        way = first.way
        if way and any(r.stack is not first.stack and r.way != way for r in records):
            unlike_sites.append(seq)
    for seq in unlike_sites:
        if (silent := by_site(index, log, seq)) is not None:
            fair = _fair(index, silent)
            divergences.append(replace(fair, borne_out=any(d.blocks and d.seq > seq for d in divergences)))
            break
    if index.refused:
        divergences = [refused_before(index, log, d) or d for d in divergences]
    divergences.sort(key=lambda d: d.seq)
    first_block = next((i for i, d in enumerate(divergences) if d.blocks), len(divergences))
    return divergences[: first_block + 1]


# --- a contradiction that everybody sees ------------------------------------------------------------


def _classify(index: EvidenceIndex, log: GroupCalls, mismatch: Mismatch) -> Divergence:
    """Return the divergence behind a mismatch, such as a skipped or an added call."""
    culprit, witness = mismatch.culprits[0], (mismatch.reference or mismatch.culprits)[0]
    mine, reference_call = mismatch.records[culprit], mismatch.records[witness]
    divergence = Divergence(
        kind=mismatch.kind,
        group_log=log,
        seq=mismatch.seq,
        culprits=mismatch.culprits,
        reference=mismatch.reference,
        expected=reference_call,
        got=mine,
        tie=mismatch.tie,
        mismatch=mismatch,
    )
    if "new_group" in (mine.op, reference_call.op):
        culprits, reference = _creators(mismatch)
        kind = Kind.GROUP_CREATION_ORDER
        if culprits != mismatch.culprits or mine.op != reference_call.op:
            met = mismatch.records
            divergence = replace(divergence, tie=False, expected=met[reference[0]], got=met[culprits[0]])
        return replace(divergence, kind=kind, culprits=culprits, reference=reference)
    relation = relate(mine, reference_call, index.evidence.sources)
    mine_is_new = not _called_before(log, mine, reference_call.rank)
    relation = replace(  # what the other rank has called, too, is not for some ranks only: `rank != 1 or step != 2`
        relation,
        guard_is_outer=relation.guard_is_outer and mine_is_new,
        mine_for_some=relation.mine_for_some and mine_is_new,
        theirs_for_some=relation.theirs_for_some and not _called_before(log, reference_call, mine.rank),
    )
    divergence = replace(divergence, relation=relation)
    mine_ahead, theirs_ahead = (
        calls_from(log, culprit, mismatch.seq),
        calls_from(log, witness, mismatch.seq),
    )
    explanations = hypotheses(mine_ahead, theirs_ahead, least=1)
    score, kind = explanations[0]
    if (earlier := _earlier(log, divergence, score)) is not None:
        return earlier
    if score < 2 and _from_two_threads(mine, reference_call):
        return replace(divergence, kind=Kind.THREAD_RACE)
    may_lack = len(theirs_ahead) < 2 or any(one is Kind.MISSING_RANK for _, one in explanations)
    if score >= 2 and kind is Kind.EXTRA_COLLECTIVE and may_lack:
        if relation.only_theirs_skipped or left_out(index, reference_call, mine, by_past=True):
            kind = Kind.MISSING_RANK  # it used to make theirs first: one round short looks like one call too many
    if score >= 2 and kind is Kind.OP_MISMATCH:
        return _settled(index, divergence)  # afterwards they agree again: it is this one call
    if score < 2 and mismatch.kind is Kind.SPLITS_MISMATCH and mine.site == reference_call.site:
        return _settled(index, divergence)  # one call at one line, and nothing later that tells of another
    if score < 2 and (by_round := _by_round(relation)) is not None:
        return replace(divergence, kind=by_round)
    if score < 2:
        one_sided = relation.mine_for_some != relation.theirs_for_some
        if not one_sided and (by_habit := _by_habit(index, divergence)) is not None:
            return by_habit
        score, kind = hypotheses(mine_ahead, ahead_of(log, witness, mismatch.seq), least=1)[0]
    if score >= 2 and kind is not Kind.OP_MISMATCH:
        if kind is Kind.WRONG_ORDER and threads_raced(mine_ahead, theirs_ahead, by_site=False):
            kind = Kind.THREAD_RACE
        elif kind in (Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE) and (
            Kind.UNEVEN_ITERATIONS in (_by_round(relation), _by_text(log, mine, reference_call, relation))
        ):
            kind = Kind.UNEVEN_ITERATIONS  # what it left out, or added, are rounds of a loop
        return replace(divergence, kind=kind)
    divergence = replace(divergence, kind=_by_text(log, mine, reference_call, relation) or divergence.kind)
    return divergence if divergence.kind in SHIFTS else _settled(index, divergence)


def _fair(index: EvidenceIndex, divergence: Divergence) -> Divergence:
    """Try to decide a tie between two sides.

    The culprit is the side whose call is only for some ranks (`if rank == 0`), else the side that passed a call that
    it used to make; otherwise it remains a tie. The result does not depend on whether later calls are known.
    """
    relation = divergence.relation
    if not divergence.tie or divergence.kind not in SHIFTS or relation is None:
        return divergence
    if relation.mine_for_some and not relation.theirs_for_some:
        return replace(divergence, kind=Kind.EXTRA_COLLECTIVE, tie=False)
    if relation.theirs_for_some and not relation.mine_for_some:
        return replace(_other_way_round(divergence), kind=Kind.EXTRA_COLLECTIVE)
    if (by_sisters := _by_sisters(index, divergence)) is not None:
        return by_sisters
    if divergence.kind is Kind.UNEVEN_ITERATIONS:
        return divergence  # who went round too often, and who not often enough, nobody knows
    return _by_habit(index, divergence) or _settled(index, divergence)


def _by_sisters(index: EvidenceIndex, divergence: Divergence) -> Divergence | None:
    """Return the divergence decided by the other groups of the mesh dimension, which made one of the two calls, or
    None.
    """
    log, mine, reference_call = divergence.group_log, divergence.got, divergence.expected
    mine_is_usual = usual_in_sisters(index, log, divergence.seq, mine, reference_call)
    if mine_is_usual is None:
        return None
    if not mine_is_usual:
        return replace(divergence, tie=False)
    relation = relate(reference_call, mine, index.evidence.sources)
    kind = _by_text(log, reference_call, mine, relation) or Kind.MISSING_RANK
    return replace(_other_way_round(divergence), kind=kind, relation=relation)


def _earlier(log: GroupCalls, divergence: Divergence, score: int) -> Divergence | None:
    """Return the divergence at an earlier call that one side left out or added, if it explains more than *score*
    calls.
    """
    culprit, witness = divergence.got.rank, divergence.expected.rank
    shift = earlier_shift(log, culprit, witness, divergence.seq)
    if shift is None or shift[0] <= score:
        return None
    _, seq, kind = shift
    met = log.meetings[seq]
    return replace(
        divergence,
        kind=kind,
        seq=seq,
        expected=met[witness],
        got=met[culprit],
        relation=None,
        mismatch=None,
        borne_out=True,
    )


def _from_two_threads(mine: CallRecord, other: CallRecord) -> bool:
    """Return whether two threads make the two calls, at different lines.

    Threads whose names differ only in a number (`worker-0`, `worker-1`) belong to one part of the program and do not
    count.
    """
    return mine.site != other.site and NUMBER.sub("", mine.thread) != NUMBER.sub("", other.thread)


def _settled(index: EvidenceIndex, divergence: Divergence) -> Divergence:
    """Decide a tie if only one side does what other ranks of the world do at that line: that side is right."""
    if not divergence.tie or divergence.mismatch is None:
        return divergence
    mine = is_usual(index, divergence.got, but=divergence.culprits)
    reference_is_usual = is_usual(index, divergence.expected, but=divergence.reference)
    if mine == reference_is_usual:
        return divergence
    if reference_is_usual:
        return replace(divergence, tie=False)
    return replace(_other_way_round(divergence), kind=OPPOSITE.get(divergence.kind, divergence.kind))


def _other_way_round(divergence: Divergence) -> Divergence:
    """Return the divergence with the reference as the culprit, and not as a tie."""
    return replace(
        divergence,
        culprits=tuple(sorted(divergence.reference)),
        reference=divergence.culprits,
        expected=divergence.got,
        got=divergence.expected,
        mismatch=None if divergence.mismatch is None else divergence.mismatch.swapped(),
        tie=False,
    )


def _by_habit(index: EvidenceIndex, divergence: Divergence) -> Divergence | None:
    """Return the divergence in which the side that passed the other's call is the culprit, or None."""
    mine, reference_call = divergence.got, divergence.expected
    if mine.op == reference_call.op and not (is_usual(index, mine) and is_usual(index, reference_call)):
        return None
    if left_out(index, reference_call, mine):
        return replace(divergence, kind=Kind.MISSING_RANK, tie=False)
    if left_out(index, mine, reference_call):
        if not divergence.tie:
            return replace(divergence, kind=Kind.EXTRA_COLLECTIVE)
        return replace(_other_way_round(divergence), kind=Kind.MISSING_RANK)
    return None


def _creators(mismatch: Mismatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (culprits, others) if new_group met another call: the ranks that did not call new_group are the
    culprits.

    Their number does not matter.
    """
    records = mismatch.records
    creating = tuple(sorted(rank for rank, r in records.items() if r.op == "new_group"))
    if len(creating) == len(records):
        return mismatch.culprits, mismatch.reference
    return tuple(sorted(set(records) - set(creating))), creating


def _called_before(log: GroupCalls, record: CallRecord, by: int) -> bool:
    return record.site is not None and any(
        r.seq < record.seq and r.way == record.way and r.op == record.op for r in log.calls.get(by, ())
    )


def _by_round(relation: Relation) -> Kind | None:
    """Return the kind if one of the two calls is made in every round of a loop that contains both, else None.

    The rank at the other call has then not left that call out; it makes more of the other call: rounds of a loop,
    unless others do not come to that loop.
    """
    if relation.theirs_each_round and not relation.mine_each_round:
        if relation.still_in_loop and not (relation.mine_for_some or relation.guard_is_outer):
            return Kind.UNEVEN_ITERATIONS
        return Kind.EXTRA_COLLECTIVE if relation.my_guard is not None else None
    if relation.mine_each_round and not relation.theirs_each_round and relation.left_loop:
        return Kind.UNEVEN_ITERATIONS
    return None


def _by_text(log: GroupCalls, mine: CallRecord, other: CallRecord, relation: Relation) -> Kind | None:
    """Decide without later calls: by completed loops, then by the program's source."""
    if relation.mine_for_some and not relation.theirs_for_some:
        return Kind.EXTRA_COLLECTIVE
    one_line = relation.mine == relation.theirs is not None and relation.left_loop != relation.still_in_loop
    each_round = relation.left_loop and relation.only_theirs_skipped and _called_before(log, mine, other.rank)
    if (one_line or each_round) and _from_line(log, relation.theirs, mine, other):
        return Kind.UNEVEN_ITERATIONS  # both have gone round that loop, and one of them goes round once more
    mine_is_new = not _called_before(log, mine, other.rank)
    theirs_is_new = not _called_before(log, other, mine.rank)
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
        if mine_is_new and not theirs_is_new and relation.passed and relation.my_guard is not None:
            return Kind.EXTRA_COLLECTIVE  # it made theirs in this round; they are in the next one
        return Kind.MISSING_RANK
    if relation.order is Order.BEFORE:
        if relation.my_guard is not None:
            return Kind.EXTRA_COLLECTIVE
        if not mine_is_new or (relation.theirs_for_some and _at_its_line_again(log, mine)):
            return Kind.MISSING_RANK  # it is in the next round already
    return None


def _from_line(log: GroupCalls, line: Site | None, mine: CallRecord, other: CallRecord) -> bool:
    """Return whether both ranks made one and the same call through *line* just before, as in a round of a loop."""
    before = log.meetings.get(mine.seq - 1, {})
    ways = [before[call.rank].way if call.rank in before else () for call in (mine, other)]
    return ways[0] == ways[1] and line in ways[0]


def _at_its_line_again(log: GroupCalls, record: CallRecord) -> bool:
    """Return whether the rank has called from this line before; a line of DDP makes other calls in its first rounds."""
    return any(r.seq < record.seq and r.way == record.way for r in log.calls.get(record.rank, ()))


def by_site(index: EvidenceIndex, log: GroupCalls, seq: int) -> Divergence | None:
    """Return a divergence in which the calls agree, but a rank makes them at lines that the others use for other
    calls.

    Ranks may legally make a call from different lines (`if rank == 0: ... else: ...`). So a rank is named only if
    its lines are the majority's lines, skipped, repeated or swapped, and its own past does not explain it.
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
    others = _common(log, vote.reference, seq)
    for rank in vote.culprits:
        mine = calls_from(log, rank, seq)
        kind = _silent_kind(index, log, mine, others)
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
            mine, others = calls_from(log, culprits[0], seq), calls_from(log, witness, seq)
            kind = _silent_kind(index, log, mine, others) or kind
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


def _common(log: GroupCalls, ranks: Sequence[int], seq: int) -> list[CallRecord]:
    """Return what all of *ranks* do from *seq* on, while most of the group makes it at one line."""
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
    index: EvidenceIndex, log: GroupCalls, mine: Sequence[CallRecord], others: Sequence[CallRecord]
) -> Kind | None:
    if not mine or not others:
        return None
    relation = relate(mine[0], others[0], index.evidence.sources)
    if relation.order is Order.EXCLUSIVE and _swapped_text(index, mine, others):
        return Kind.WRONG_ORDER
    branches = relation.order is Order.EXCLUSIVE and not relation.swapped
    scored = hypotheses(mine, others, least=2)
    if not scored or scored[0][0] < 2:
        return None
    kind = scored[0][1]
    if kind is Kind.EXTRA_COLLECTIVE and relation.only_theirs_skipped:
        kind = Kind.MISSING_RANK  # every round makes mine: it is in the next one
    if branches and kind is not Kind.WRONG_ORDER:
        return None  # two branches of one decision: legal, unless they make the same calls in another order
    if kind is not Kind.WRONG_ORDER and not _ends_short(index, log, mine[0].rank, others[0].rank):
        return None
    return kind


def _swapped_text(index: EvidenceIndex, mine: Sequence[CallRecord], others: Sequence[CallRecord]) -> bool:
    """Return whether two branches have the same lines in a different order: `f(b); f(a)` and `f(a); f(b)`."""
    lines = [[line_of(index.evidence.sources, call.site) for call in calls[:HORIZON]] for calls in (mine, others)]
    texts = [[line.partition(" #")[0].strip() for line in of_side] for of_side in lines]
    for k in range(2, min(map(len, texts)) + 1):
        one, other = texts[0][:k], texts[1][:k]
        if one != other and all(one) and Counter(one) == Counter(other):
            return True
    return False


def _ends_short(index: EvidenceIndex, log: GroupCalls, one: int, other: int) -> bool:
    """Return whether one of the two ranks has ended with fewer calls, as a shift requires. A running rank is only
    behind.
    """
    mine, other_last = log.calls[one][-1], log.calls[other][-1]
    if mine.seq == other_last.seq:
        # strict ends both without making them
        over = mine.state is State.COMPLETED and other_last.state is State.COMPLETED
        return (mine.site, mine.op) != (other_last.site, other_last.op) and not over
    behind = one if mine.seq < other_last.seq else other
    return index.states[behind].phase in (Phase.FINISHED, Phase.BLOCKED)


def _settle_by_past(log: GroupCalls, vote: Vote, seq: int) -> Vote | None:
    """Decide an even split by the earlier calls: only a rank that deviates from its own pattern can be named."""
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
