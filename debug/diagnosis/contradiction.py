"""Explains contradictions between the calls of one group in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.absence import group_mismatch
from distsim.debug.diagnosis.context import Case
from distsim.debug.divergence.divergence import SHIFTS, Divergence, refusal_advice, refusal_text
from distsim.debug.matching.agreement import Mismatch, split_conflicts
from distsim.debug.messages import (
    advice,
    are,
    call_text,
    capital,
    creation_advice,
    group_text,
    ranks_text,
    shape_of_call,
    site_text,
    some_ranks_text,
)
from distsim.debug.records import CallRecord, Site, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof
from distsim.text.units import plural

UNLIKE = frozenset(
    {Kind.OP_MISMATCH, Kind.SHAPE_MISMATCH, Kind.DTYPE_MISMATCH, Kind.REDUCE_OP_MISMATCH, Kind.MISSING_RANK}
)
"""Kinds of two calls that do not fit, one of which may be meant for another group."""
SAME_LINE = frozenset({Kind.SHAPE_MISMATCH, Kind.DTYPE_MISMATCH, Kind.REDUCE_OP_MISMATCH})
"""Kinds for which calls from one line may still be different calls of the program, by their callers."""
MOST_SIDES = 6
"""Maximum number of different values that are listed."""


def contradiction(case: Case, divergence: Divergence, victims: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of the first number at which a group's members are not in the same call."""
    d = divergence
    if d.kind is Kind.EXTRA_COLLECTIVE and (other := _awaited_on_another_group(case, d)) is not None:
        diagnosis = group_mismatch(case, d.got, other, d.culprits, [other.rank], [*victims, *d.reference])
        return replace(diagnosis, proof=Proof.MET) if d.met else diagnosis
    if (
        d.kind in UNLIKE
        and d.got.way != d.expected.way
        and (strayed := _on_a_wrong_group(case, d, victims)) is not None
    ):
        return replace(strayed, proof=Proof.MET) if d.met else strayed
    met = d.group_log.meetings.get(d.seq, {})
    if d.met:  # who has not waited for its handle yet cannot be helped either
        victims = [*victims, *(rank for rank in d.reference if met[rank].state is not State.COMPLETED)]
    sites = {rank: site for rank, record in met.items() if (site := record.site) is not None}
    if d.refused is not None and d.refused.site is not None:
        sites |= dict.fromkeys(d.culprits, d.refused.site)
    result = case.diagnosis(
        d.kind,
        d.culprits,
        victims,
        call=d.got if d.kind is Kind.EXTRA_COLLECTIVE else d.expected,
        group=d.group_log.group,
        explanation=explanation(d),
        suggestion=suggestion(d),
        since_s=max(d.got.issued_s, d.expected.issued_s),
        sites=sites,
    )
    return replace(result, proof=Proof.MET) if d.met else result


def _on_a_wrong_group(case: Case, d: Divergence, victims: Sequence[int]) -> Diagnosis | None:
    """Return the diagnosis of the side whose call another group waits for, at its line; None if both are, or none."""
    sides = [(d.got, d.culprits, d.reference), *([(d.expected, d.reference, d.culprits)] if d.tie else [])]
    strayed = [
        (mine, ranks, others, wait)
        for mine, ranks, others in sides
        if (wait := _awaited_at_its_line(case, mine)) is not None
    ]
    if len(strayed) != 1:
        return None
    mine, ranks, others, wait = strayed[0]
    return group_mismatch(case, mine, wait, ranks, [wait.rank], [*victims, *others])


def _awaited_at_its_line(case: Case, mine: CallRecord) -> CallRecord | None:
    """Return a call of another rank at the line of *mine*, on a group where this rank has not made it."""
    for log in case.index.group_logs:
        if log.group == mine.group or mine.rank not in log.group.ranks:
            continue
        for met in log.meetings.values():
            own = met.get(mine.rank)
            if own is not None and (own.op, own.way) == (mine.op, mine.way):
                continue
            for call in met.values():
                if not call.done and (call.op, call.way) == (mine.op, mine.way):
                    return call
    return None


def _awaited_on_another_group(case: Case, d: Divergence) -> CallRecord | None:
    """Return the call in which another rank waits for the culprit, at the line of the culprit's call, on the group
    on which the culprit has made that call before.
    """
    mine = d.got
    calls = [r for r in case.index.records(mine.rank) if (r.op, r.way) == (mine.op, mine.way)]
    usual = {r.group for r in calls if r.group != mine.group}
    for rank in case.index.states:
        for wait in case.index.call_waits(rank) if rank not in d.culprits else ():
            if (wait.op, wait.way) == (mine.op, mine.way) and wait.group in usual and mine.rank in wait.group.ranks:
                return wait
    return None


def explanation(d: Divergence) -> str:
    """Describe the calls of the culprits and of the others."""
    others = ranks_text(d.reference)
    second = f"{capital(others)} {are(d.reference, 'is', 'are')} in {_at(d.expected)}."
    if not d.reference:
        second = "No two ranks agree."
    elif d.kind is Kind.SPLITS_MISMATCH:
        second = "The records do not show which of the two is wrong." if d.tie else ""
    elif d.tie and d.kind is not Kind.THREAD_RACE:
        second = f"{second[:-1]}; the group is split evenly, so the culprit is chosen by rank order."
    return f"{capital(_what(d))} {second}".rstrip()


def suggestion(d: Divergence) -> str:
    """Return what to do next."""
    if d.refused is not None:
        return refusal_advice(d.refused)
    if d.got.op == d.expected.op == "new_group" and d.got.new_ranks != d.expected.new_ranks:
        if d.got.site == d.expected.site and set(d.got.new_ranks or ()) & set(d.expected.new_ranks or ()):
            # one group of which the ranks have other members, and not two groups in another order
            return (
                f"Compute the members at {site_text(d.got.site)} alike on every rank: {list(d.got.new_ranks or ())} on "
                f"{ranks_text(d.culprits)}, {list(d.expected.new_ranks or ())} on the others. What they are computed "
                "from differs: broadcast it from rank 0."
            )
        calls = sorted({c.new_ranks or () for c in d.group_log.meetings.get(d.seq, {}).values()})
        listed = [f"new_group({list(ranks)})" for ranks in calls[:MOST_SIDES]]
        more = "" if len(calls) <= MOST_SIDES else f" and {len(calls) - MOST_SIDES} more"
        return (
            f"Call {', then '.join(listed)}{more} on every rank of the world, in this order, also where the rank is no "
            "member; or pass use_local_synchronization=True."
        )
    if d.kind in SHIFTS and d.got.site is not None and d.got.site == d.expected.site and d.got.op != d.expected.op:
        return (
            f"{site_text(d.got.site)} makes different calls on some ranks: build and wrap the model in the same way on "
            "every rank."
        )
    if d.kind in SAME_LINE and d.got.site is not None and d.got.site == d.expected.site:
        callers = _callers(d.got, d.expected)
        if callers is not None:
            mine, other = map(site_text, callers)
            return (
                f"Find the call that was left out or added before: {ranks_text(d.culprits)} "
                f"{are(d.culprits, 'comes', 'come')} to {site_text(d.got.site)} by {mine}, and the others by {other}."
            )
    if d.kind is Kind.GROUP_CREATION_ORDER:
        return creation_advice(d.expected, "")
    return advice(d.kind, who=some_ranks_text(d.culprits), mine=site_text(d.got.site), other=site_text(d.expected.site))


def _callers(one: CallRecord, other: CallRecord) -> tuple[Site, Site] | None:
    """Return the innermost frames in which two ways to one line differ; None if one way is a part of the other."""
    return next(((a, b) for a, b in zip(one.way, other.way, strict=False) if a != b), None)


def _at(record: CallRecord) -> str:
    return f"{shape_of_call(record)} at {site_text(record.site)}"


def _split(d: Divergence, mismatch: Mismatch) -> str:
    """Return the first pair that a culprit does not agree with, and how many more there are."""
    conflicts = split_conflicts(list(mismatch.records.values()))
    own = [c for c in conflicts if c.sender in d.culprits or c.receiver in d.culprits]
    first = own[0]
    sender, receiver = mismatch.records[first.sender], mismatch.records[first.receiver]
    if first.receiver in d.culprits:
        sentence = (
            f"rank {first.receiver} expects {plural(first.expected, 'element')} from rank {first.sender}, "
            f"at {site_text(receiver.site)}, but rank {first.sender} sends it {plural(first.sent, 'element')}"
        )
    else:
        sentence = (
            f"rank {first.sender} sends {plural(first.sent, 'element')} to rank {first.receiver}, "
            f"at {site_text(sender.site)}, but rank {first.receiver} expects {plural(first.expected, 'element')}"
        )
    rest = len(conflicts) - 1
    more = f" (and {plural(rest, 'more such pair')})" if rest else ""
    return f"{sentence}{more}, in {call_text(d.expected)}"


def _what(d: Divergence) -> str:
    who, on = ranks_text(d.culprits), f"on {group_text(d.group_log.group)}"
    they = "it is" if len(d.culprits) == 1 else "they are"
    match d.kind:
        case Kind.MISSING_RANK if d.refused is not None:
            return (
                f"{refusal_text(d.refused, d.culprits)}, so it never reached {call_text(d.expected)} {on}, at "
                f"{site_text(d.expected.site)}: {they} in {_at(d.got)}."
            )
        case Kind.MISSING_RANK:
            there = site_text(d.expected.site)
            return f"{who} never called {call_text(d.expected)} {on}, at {there}: {they} in {_at(d.got)}."
        case Kind.EXTRA_COLLECTIVE:
            there = site_text(d.got.site)
            return f"{who} called {call_text(d.got)} {on}, at {there}, which the others do not call there."
        case Kind.WRONG_ORDER:
            return f"{who} called {_at(d.got)} as number {d.seq} {on}, where the others make another call first."
        case Kind.THREAD_RACE:
            return (
                f"{who} issued calls {on} from several threads, in another order than the others: "
                f"number {d.seq} is {_at(d.got)}."
            )
        case Kind.UNEVEN_ITERATIONS if d.relation is not None and d.relation.left_loop != d.relation.still_in_loop:
            if d.relation.left_loop:
                has = are(d.culprits, "has", "have")
                return f"{who} {has} left a loop that the others are still in, {on}: {they} in {_at(d.got)}."
            goes = are(d.culprits, "goes", "go")
            return f"{who} {goes} through a loop more often than the others {on}: {they} in {_at(d.got)}."
        case Kind.UNEVEN_ITERATIONS:
            verb = are(d.culprits, "is", "are")
            return f"{who} {verb} in another iteration than the others {on}, in {_at(d.got)}."
        case Kind.GROUP_CREATION_ORDER:
            return f"{who} called {_at(d.got)} as number {d.seq} {on}."
        case Kind.SPLITS_MISMATCH if d.mismatch is not None:
            return f"{_split(d, d.mismatch)} {on}."
        case _:
            says = "" if d.mismatch is None else d.mismatch.actual.get(d.got.rank, "")
            wanted = ""
            if d.mismatch is not None and says:
                wanted = f": {says} where {d.mismatch.expected} is expected"
            if d.mismatch is not None and len(set(d.mismatch.actual.values())) > 1:
                at = site_text(d.got.site)
                return f"{who} called {d.got.op} at {at} as number {d.seq} {on} with {_each(d.mismatch)}."
            return f"{who} called {_at(d.got)} as number {d.seq} {on}{wanted}."


def _each(mismatch: Mismatch) -> str:
    """Return the culprits' values, such as `float32[5] (rank 1) and float32[6] (ranks 2,3)`."""
    sides: dict[str, list[int]] = {}
    for rank, description in mismatch.actual.items():
        sides.setdefault(description, []).append(rank)
    descriptions = [f"{description} ({ranks_text(ranks)})" for description, ranks in sides.items()]
    if len(descriptions) > MOST_SIDES:
        descriptions = [*descriptions[:MOST_SIDES], f"{len(descriptions) - MOST_SIDES} others"]
    return f"{', '.join(descriptions[:-1])} and {descriptions[-1]}"
