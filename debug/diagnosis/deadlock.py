"""Ranks that wait for each other: cycles through groups, crossed sends, messages that never meet."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.diagnosis.absence import absent_from_call, extra_call, group_mismatch, loop_ended
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.point_to_point import near_miss, unmatched
from distsim.debug.divergence.divergence import left_out
from distsim.debug.divergence.source_order import Order, calls_below, relate
from distsim.debug.messages import call_text, capital, group_text, ranks_text, site_text
from distsim.debug.records import CallRecord, CallWait, Group, HostWait, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["knot"]


GroupKey = tuple[str, tuple[int, ...], int]

SHOWN = 6
"""Ranks of a cycle that the explanation spells out; `Diagnosis.stuck` has all of them."""


def knot(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of ranks that wait for each other."""
    cycle = case.graph.cycle(ranks)
    calls = {rank: _call_on_cycle(case, rank, cycle) for rank in cycle}
    everyone = [*victims, *ranks]
    if (result := _strayed(case, ranks, victims)) is not None:
        return result
    if (result := _left_out(case, cycle, calls, everyone)) is not None:
        return result
    if (result := _left_loop(case, cycle, calls, everyone)) is not None:
        return result
    if (result := _message_missing(case, ranks, victims)) is not None:
        return result
    if (result := _other_group(case, ranks, victims)) is not None:
        return result
    return _cycle(case, cycle, calls, [*victims, *(r for r in ranks if r not in cycle)])


def _left_out(
    case: Case, cycle: Sequence[int], calls: dict[int, CallRecord | None], everyone: Sequence[int]
) -> Diagnosis | None:
    """Diagnose a cycle that exists only because one rank skipped a call, or made one that no other rank makes."""
    diagnoses: list[Diagnosis] = []
    for i, rank in enumerate(cycle):
        awaited, call = calls[cycle[i - 1]], calls[rank]
        if awaited is None or call is None or awaited.is_p2p or rank not in awaited.group.ranks:
            continue
        if left_out(case.index, awaited, call):
            diagnoses.append(absent_from_call(case, awaited, [rank], [r for r in everyone if r != rank]))
        elif not call.is_p2p and _under_condition(case, awaited, call):
            diagnoses.append(extra_call(case, call, [r for r in everyone if r != rank]))
    return diagnoses[0] if len(diagnoses) == 1 else None


def _strayed(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis | None:
    """Return the diagnosis if one rank makes a call on a group it never used in that place, and is awaited there on
    its usual one. (A place is a line with all its callers: a helper may be called for any group.)
    """
    places: dict[tuple[Site, ...], dict[GroupKey, list[CallRecord]]] = {}
    for rank in ranks:
        for call in case.index.call_waits(rank):
            if not call.is_p2p and call.site is not None:
                places.setdefault(call.stack, {}).setdefault(_key(call.group), []).append(call)
    strays: dict[int, tuple[CallRecord, CallRecord, list[int]]] = {}
    for stack, by_group in places.items():
        if len(by_group) < 2:
            continue
        members = {key: frozenset(calls[0].group.ranks) for key, calls in by_group.items()}
        for key, calls in by_group.items():
            for mine in calls:
                before = case.index.records(mine.rank)
                usual = {_key(r.group) for r in before if r.stack == stack and r is not mine}
                if key in usual:
                    continue
                for other in by_group:
                    if other in usual and mine.rank in members[other]:
                        other_calls = by_group[other]
                        strays.setdefault(mine.rank, (mine, other_calls[0], []))[2].extend(r.rank for r in other_calls)
    if len(strays) != 1:
        return None
    ((rank, (mine, theirs_first, others)),) = strays.items()
    rest = [r for r in (*ranks, *victims) if r != rank and r not in others]
    return group_mismatch(case, mine, theirs_first, [rank], others, rest)


def _key(group: Group) -> GroupKey:
    """Return a key of a group. Comparing and hashing the ranks themselves is slow for thousands of ranks."""
    return group.name, group.ranks[:1], len(group.ranks)


def _left_loop(
    case: Case, cycle: Sequence[int], calls: dict[int, CallRecord | None], everyone: Sequence[int]
) -> Diagnosis | None:
    """Return the diagnosis of a cycle that exists because a rank has left a loop, or skipped an iteration, and
    another has not.
    """
    diagnoses: list[Diagnosis] = []
    for i, rank in enumerate(cycle):
        awaited, call = calls[cycle[i - 1]], calls[rank]
        log = None if awaited is None else case.index.group_log(awaited)
        if awaited is None or call is None or log is None or call.is_p2p or rank not in awaited.group.ranks:
            continue
        relation = relate(call, awaited, case.index.evidence.sources)
        if relation.certain and relation.order is Order.AFTER and relation.left_loop:
            fewer = loop_ended(case, log, awaited, [rank], [r for r in everyone if r != rank])
            diagnoses += [] if fewer is None else [fewer]
    return diagnoses[0] if len(diagnoses) == 1 else None


def _under_condition(case: Case, awaited: CallRecord, call: CallRecord) -> bool:
    """Return whether *call* is inside an `if` of its own, before *awaited* or after it for some ranks, and no other
    rank made it.
    """
    relation = relate(call, awaited, case.index.evidence.sources)
    before = relation.order is Order.BEFORE and relation.my_guard is not None
    for_some = relation.mine_for_some and not relation.theirs_for_some
    after = relation.order is Order.AFTER and relation.passed and for_some
    if not relation.certain or not (before or after):
        return False
    return not any(
        record.site == call.site
        for rank in case.index.states
        if rank != call.rank
        for record in case.index.records(rank)
    )


def _call_on_cycle(case: Case, rank: int, cycle: Sequence[int]) -> CallRecord | None:
    """Return the call in which a rank waits for the next one of the cycle."""
    after = cycle[(list(cycle).index(rank) + 1) % len(cycle)]
    for need in case.graph.needs.get(rank, ()):
        if after in need.ranks and isinstance(need.wait, CallWait):
            return need.wait.record
    calls = case.index.call_waits(rank)
    return calls[0] if calls else None


def _cycle(
    case: Case, cycle: tuple[int, ...], calls: dict[int, CallRecord | None], victims: Sequence[int]
) -> Diagnosis:
    steps = []
    for i, rank in enumerate(cycle):
        after = cycle[(i + 1) % len(cycle)]
        call = calls[rank]
        if call is None:
            waited_for = next((w.what for w in case.index.waits(rank) if isinstance(w, HostWait)), "it")
            steps.append(f"rank {rank} waits on the host ({waited_for}) for rank {after}")
        else:
            on = "" if call.is_of_two else f" on {group_text(call.group)}"
            steps.append(f"rank {rank} waits in {call_text(call)}{on}, at {site_text(call.site)}, for rank {after}")
    if len(steps) > SHOWN:
        steps = [*steps[: SHOWN - 1], f"and so on over {len(steps) - SHOWN} more ranks", steps[-1]]
    waiting_calls = [call for call in calls.values() if call is not None]
    first = min(waiting_calls, key=lambda c: c.rank, default=None)  # who came first differs from run to run
    if waiting_calls and all(c.is_p2p for c in waiting_calls):
        suggestion = _messages_advice(waiting_calls)
    elif any(c.is_p2p for c in waiting_calls):
        suggestion = "Make the send or receive and the collective in the same order on every rank."
    else:
        suggestion = (
            "Use the groups in the same order on every rank, "
            "or start both calls with async_op=True and wait afterwards."
        )
    latest = max((c.issued_s for c in waiting_calls), default=None)
    return case.diagnosis(
        Kind.DEADLOCK_CYCLE,
        cycle,
        victims,
        call=first,
        explanation=f"{capital(ranks_text(cycle))} wait for each other in a circle. " + capital("; ".join(steps)) + ".",
        suggestion=suggestion,
        since_s=latest,
        cycle=cycle,
    )


def _messages_advice(calls: Sequence[CallRecord]) -> str:
    """Return advice on breaking a cycle of messages.

    NCCL runs the messages of a pair on one stream in the order of the calls, so that `isend` waits for the other
    side like `send`.
    """
    if any(c.device != "cpu" for c in calls):
        return (
            "Start both with batch_isend_irecv([P2POp(isend, ...), P2POp(irecv, ...)]), or let one rank receive "
            "first: NCCL runs the messages of a pair in the order of the calls, isend and irecv, too."
        )
    return "Let one of them receive first, or use isend / irecv or batch_isend_irecv and wait for both."


def _message_missing(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis | None:
    """Return a send or receive in the knot whose other end is not just late, but somewhere else."""
    inside = frozenset(ranks)
    lonely: list[CallRecord] = []
    for rank in ranks:
        for need in case.graph.needs.get(rank, ()):
            if isinstance(need.wait, CallWait) and need.wait.record.is_p2p and not inside.isdisjoint(need.ranks):
                lonely.append(need.wait.record)
    lonely.sort(key=lambda c: (c.op == "send", c.rank, c.index))  # who came first differs from run to run
    for call in lonely:
        if near_miss(case.index, call) is not None:
            return unmatched(case, call, [*ranks, *victims], cycle=None)
    if not lonely:
        return None
    call = lonely[0]
    if any(other.peer != call.peer for other in lonely) or (call.peer is None and len(lonely) > 1):
        return None
    peers = [call.peer] if call.peer is not None else [rank for rank in call.group.ranks if rank != call.rank]
    for peer in peers:
        instead = case.index.call_waits(peer)
        if not instead or instead[0].is_p2p or call.rank not in instead[0].group.ranks:
            return None
        if any(_comes_later(case, peer, other, instead[0]) for other in lonely):
            return None  # the peer's program has the other end, but after its collective: a cycle
    return unmatched(case, call, [*ranks, *victims], cycle=case.graph.cycle(ranks))


def _comes_later(case: Case, peer: int, call: CallRecord, instead: CallRecord) -> bool:
    """Return whether the peer has earlier made the other end after that collective (in an earlier round)."""
    other = "send" if call.op == "recv" else "recv"
    seen = False
    for record in case.index.records(peer):
        if record is instead:
            break
        if record.op == instead.op and record.site == instead.site and record.site is not None:
            seen = True
        elif seen and record.op == other and record.peer == call.rank:
            return True
    return calls_below(instead.site, other, case.index.evidence.sources)


def _other_group(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis | None:
    """Return one call of the program, made on different groups by ranks that should have met in it."""
    waits: dict[int, CallRecord] = {}
    for rank in ranks:
        calls = case.index.call_waits(rank)
        if calls and not calls[0].is_p2p:
            waits[rank] = calls[0]
    by_group: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, call in waits.items():
        by_group.setdefault((call.group.name, call.group.ranks), []).append(rank)
    if len(by_group) != 2:
        return None
    sides = sorted(by_group.values(), key=lambda side: (len(side), side != min(by_group.values())))
    few, many = sides[0], sides[1]
    if len(few) == len(many) and min(few) < min(many):
        few, many = many, few
    mine, others = waits[few[0]], waits[many[0]]
    a, b = frozenset(mine.group.ranks), frozenset(others.group.ranks)
    if mine.op != others.op or not (a < b or b < a):
        return None
    relation = relate(mine, others, case.index.evidence.sources)
    same_line = mine.site is not None and mine.site == others.site
    branches = relation.certain and relation.order is Order.EXCLUSIVE and not relation.swapped
    if not (same_line or branches):
        return None
    return group_mismatch(case, mine, others, few, many, [*victims, *(r for r in ranks if r not in few)])
