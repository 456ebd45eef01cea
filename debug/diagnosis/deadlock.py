"""Ranks that wait for each other: cycles through groups, crossed sends, messages that never meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.debug.diagnosis.absence import absent_from_call, extra_call, group_mismatch, loop_ended
from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.point_to_point import near_miss, unmatched
from distsim.debug.diagnosis.waits.keys import KeySetters, awaited_key
from distsim.debug.divergence.divergence import is_usual, left_out
from distsim.debug.divergence.source_order import Order, calls_below, relate
from distsim.debug.messages import are, call_text, capital, group_text, ranks_text, shown_key, site_text, wait_text
from distsim.debug.records import CallRecord, CallWait, Group, HostWait, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

GroupKey = tuple[str, tuple[int, ...], int]

SHOWN = 6
"""Ranks of a cycle that the explanation spells out; `Diagnosis.stuck` has all of them."""


def knot(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of ranks that wait for each other."""
    cycle = case.graph.cycle(ranks)
    calls = {rank: _call_on_cycle(case, rank, cycle) for rank in cycle}
    everyone = [*victims, *ranks]
    return (
        _strayed(case, ranks, victims)
        or _left_out(case, cycle, calls, everyone)
        or _unexpected(case, cycle, calls, everyone)
        or _left_loop(case, cycle, calls, everyone)
        or _message_missing(case, ranks, victims)
        or _other_group(case, ranks, victims)
        or _cycle(case, cycle, calls, [*victims, *(r for r in ranks if r not in cycle)])
    )


def key_circle(case: Case, waiting: Mapping[int, Sequence[int]]) -> Diagnosis | None:
    """Return the diagnosis of ranks that wait for keys that they would set for each other; *waiting*: ranks that wait
    for a key, with their victims.
    """
    keys = KeySetters(case.index, ProgramText(case.index.evidence.sources))
    edges = {rank: lines for rank in waiting if (lines := keys.setters(rank))}
    while lacking := [rank for rank, lines in edges.items() if not lines.keys() <= edges.keys()]:
        for rank in lacking:
            del edges[rank]
    if not edges:
        return None
    path = [min(edges)]
    while (follows := min(edges[path[-1]])) not in path:
        path.append(follows)
    path = path[path.index(follows) :]
    if any(len(edges[rank]) > 1 for rank in path):
        path = sorted(edges)  # which of them sets it, the text does not show
    steps = []
    for rank in path[:SHOWN]:
        others, line = list(edges[rank]), next(iter(edges[rank].values()))
        key, at = shown_key(awaited_key(case.index, rank) or ""), site_text(case.site(rank))
        sets = are(others, "sets", "set")
        steps.append(f"rank {rank} waits for {key} at {at}, which {ranks_text(others)} {sets} at {site_text(line)}")
    other, line = next(iter(edges[path[0]].items()))
    return case.diagnosis(
        Kind.DEADLOCK_CYCLE,
        path,
        [victim for rank in path for victim in waiting[rank]],
        call=None,
        explanation=f"{capital(ranks_text(path))} wait for each other's keys in a circle: {'; '.join(steps)}.",
        suggestion=f"Break the circle: let rank {other} set the key at {site_text(line)} before it waits at "
        f"{site_text(case.site(other))} (each rank sets its own key first, then waits for the other's).",
        since_s=max((s for rank in path if (s := case.index.states[rank].since_s) is not None), default=None),
        cycle=tuple(path),
    )


def _left_out(
    case: Case, cycle: Sequence[int], calls: dict[int, CallRecord | None], everyone: Sequence[int]
) -> Diagnosis | None:
    """Diagnose a cycle that exists only because some ranks skipped a call, or made one that no other rank makes."""
    diagnoses: dict[tuple[Kind, tuple[int, ...]], Diagnosis] = {}
    of_several: dict[tuple[int, ...], Diagnosis] = {}
    for i, rank in enumerate(cycle):
        awaited, call = calls[cycle[i - 1]], calls[rank]
        if awaited is None or call is None or awaited.is_p2p or rank not in awaited.group.ranks:
            continue
        if left_out(case.index, awaited, call):
            log, here = case.index.group_log(awaited), (call.group, call.seq, call.site)
            absent = [rank] if log is None else [r for r in log.absent(awaited.seq) if _is_in(case, r, here)]
            d = absent_from_call(case, awaited, absent, [r for r in everyone if r not in absent])
        elif not call.is_p2p and (inside := _under_condition(case, awaited, call)):
            lacking = [r for r in everyone if r not in inside]
            few = len(inside) * 2 <= len(call.members)
            d = extra_call(case, call, inside, lacking) if few else absent_from_call(case, call, lacking, inside)
            if len(inside) > 1:
                of_several[d.culprits] = d
                continue
        else:
            continue
        diagnoses[d.kind, d.culprits] = d
    preferred = [*(diagnoses or of_several).values()]  # who left out a call of the circle is told by that call alone
    return preferred[0] if len(preferred) == 1 else None


def _is_in(case: Case, rank: int, call: tuple[Group, int, Site | None]) -> bool:
    """Return whether a rank waits in the call of this group, number and line."""
    return any((wait.group, wait.seq, wait.site) == call for wait in case.index.call_waits(rank))


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


def _unexpected(
    case: Case, cycle: Sequence[int], calls: dict[int, CallRecord | None], everyone: Sequence[int]
) -> Diagnosis | None:
    """Return the diagnosis if one rank alone makes a call that no parallel group has made, and only that rank lacks in
    another call.
    """
    for rank in cycle:
        call = calls[rank]
        log = None if call is None or call.is_p2p else case.index.group_log(call)
        if call is None or log is None or list(log.meetings.get(call.seq, ())) != [rank]:
            continue
        for _, need in case.graph.waiters_on([rank]):
            awaited = need.wait.record if isinstance(need.wait, CallWait) and not need.wait.record.is_of_two else None
            meeting = None if awaited is None else case.index.group_log(awaited)
            if awaited is None or meeting is None or meeting.absent(awaited.seq) != [rank]:
                continue
            if set(_calls_of_parallel_groups(case, call.group, awaited.group).values()) != {call.seq - 1}:
                continue
            rest = [other for other in everyone if other != rank]
            if is_usual(case.index, call, but=[rank]) or _stands_behind(call, awaited):  # it has left out *awaited*
                return absent_from_call(case, awaited, [rank], rest)
            others = ranks_text([other for other in awaited.group.ranks if other != rank])
            says = (
                f"{capital(others)} are in {call_text(awaited)} on {group_text(awaited.group)}, at "
                f"{site_text(awaited.site)}, and the other groups of {len(call.group.ranks)} ranks have made "
                f"{call.seq - 1} calls."
            )
            return extra_call(case, call, [rank], rest, says)
    return None


def _stands_behind(call: CallRecord, awaited: CallRecord) -> bool:
    """Return whether the ranks may still come to *call*, because its line is below that of *awaited*."""
    if not call.way or not awaited.way or call.way[-1].file != awaited.way[-1].file:
        return False
    return call.way[-1].line > awaited.way[-1].line


def _calls_of_parallel_groups(case: Case, group: Group, world: Group) -> dict[tuple[int, ...], int]:
    """Return the number of calls of each group that has the size of *group*, none of its ranks, and some of *world*."""
    calls = {log.group.ranks: max(log.meetings, default=0) for log in case.index.group_logs}
    created = {r.new_ranks: 0 for rank in group.ranks for r in case.index.records(rank) if r.new_ranks is not None}
    size, members, there = len(group.ranks), set(group.ranks), set(world.ranks)
    return {
        ranks: count
        for ranks, count in (created | calls).items()
        if len(ranks) == size and members.isdisjoint(ranks) and not there.isdisjoint(ranks)
    }


def _under_condition(case: Case, awaited: CallRecord, call: CallRecord) -> list[int]:
    """Return the ranks in *call* if it is inside an `if` of its own, before *awaited* or after it for some ranks, and
    no other rank made it; else an empty list.
    """
    relation = relate(call, awaited, case.index.evidence.sources)
    before = relation.order is Order.BEFORE and relation.my_guard is not None
    for_some = relation.mine_for_some and not relation.theirs_for_some
    in_next_round = relation.theirs_each_round and relation.my_guard is not None
    after = relation.order is Order.AFTER and (for_some or in_next_round)
    if not relation.certain or not (before or after):
        return []
    here = [rank for rank in case.index.states if _is_in(case, rank, (call.group, call.seq, call.site))]
    others = (rank for rank in case.index.states if rank not in here)
    is_made_by_others = any(record.site == call.site for rank in others for record in case.index.records(rank))
    return [] if is_made_by_others or awaited.rank in here else here


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
            steps.append(
                f"rank {rank} waits in {wait_text(CallWait(call))}, at {site_text(call.site)}, for rank {after}"
            )
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
    first = {rank: calls[0] for rank in ranks if (calls := case.index.call_waits(rank))}
    waits = {rank: call for rank, call in first.items() if not call.is_p2p}
    by_group: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, call in waits.items():
        by_group.setdefault((call.group.name, call.group.ranks), []).append(rank)
    if len(by_group) != 2:
        return None
    for rank in victims:
        for call in case.index.call_waits(rank)[:1]:
            by_group.get((call.group.name, call.group.ranks), []).append(rank)
    few, many = sorted(by_group.values(), key=lambda side: (len(side), side != min(by_group.values())))
    two_backends = waits[few[0]].group.is_beside(waits[many[0]].group)
    on_gpu = two_backends and waits[few[0]].group.beside("cpu") == waits[many[0]].group
    if len(few) == len(many) and (on_gpu if two_backends else min(few) < min(many)):
        few, many = many, few
    mine, others = waits[few[0]], waits[many[0]]
    a, b = frozenset(mine.group.ranks), frozenset(others.group.ranks)
    if mine.op != others.op or not (two_backends or a < b or b < a):
        return None
    relation = relate(mine, others, case.index.evidence.sources)
    same_line = mine.site is not None and mine.site == others.site
    branches = relation.certain and relation.order is Order.EXCLUSIVE and not relation.swapped
    if not (same_line or branches):
        return None
    return group_mismatch(case, mine, others, few, many, [*victims, *(r for r in ranks if r not in few)])
