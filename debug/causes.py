"""Ranks that are not there: they raised, left, were killed or stopped, or never called."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.case import Case
from distsim.debug.explain import are, call_text, group_text, place, ranks_text
from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, StoreWait
from distsim.debug.verdict import Diagnosis

__all__ = ["absent_from_call", "death", "host_wait", "in_flight_exception"]

_KIND = {
    Phase.RAISED: Kind.RANK_RAISED,
    Phase.EXITED: Kind.RANK_EXITED,
    Phase.KILLED: Kind.RANK_KILLED,
    Phase.FROZEN: Kind.PROCESS_FROZEN,
    Phase.HOST_STUCK: Kind.HOST_STUCK,
    Phase.ABSENT: Kind.NEVER_JOINED,
}

_NEXT = {
    Kind.RANK_RAISED: "Fix the exception of {who} first: the waiting ranks only follow from it.",
    Kind.RANK_EXITED: "Find what makes {who} leave at that line; every rank must make the same collective calls before it goes.",
    Kind.RANK_KILLED: "Look for the reason on its host: the kernel log (out of memory), the scheduler's log, a core dump.",
    Kind.PROCESS_FROZEN: "Continue it (kill -CONT) or look for a debugger, a full pipe or a suspended container on its host.",
    Kind.HOST_STUCK: "Look at its stack: what it does there must end before it can come to the call.",
    Kind.NEVER_JOINED: "Check that it was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and that its host reaches the master.",
}


def death(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Ranks that went the same way: `rank_raised`, `rank_exited`, `rank_killed`, frozen, stuck, absent."""
    first = case.world.states[ranks[0]]
    kind = _KIND[first.phase]
    call = case.first_wait(ranks)
    who = ranks_text(ranks)
    waiting = _waiting(case, call, victims)
    if call is None and (last := case.world.died_inside(ranks[0])) is not None:
        call = last
    if kind is Kind.NEVER_JOINED:
        what = f"{who} never joined the rendezvous"
    else:
        what = f"{who} {_plural(case.where(ranks[0]), ranks)}"
    sites = {rank: site for rank in ranks if (site := case.world.states[rank].site) is not None}
    return case.diagnosis(
        kind,
        ranks,
        victims,
        call=call,
        explanation=f"{_sentence(what)} {waiting}",
        suggestion=_NEXT[kind].format(who=who),
        since_s=first.since_s if first.since_s is not None else (call.issued_s if call else None),
        sites=sites,
    )


def in_flight_exception(
    case: Case, ranks: Sequence[int], victims: Sequence[int], call: CallRecord | None
) -> Diagnosis:
    """Ranks that raised, and make further calls in a `finally` or `except` block on the way out."""
    state = case.world.states[ranks[0]]
    who = ranks_text(ranks)
    return case.diagnosis(
        Kind.RANK_RAISED,
        ranks,
        victims,
        call=call,
        explanation=_sentence(
            f"{who} raised {state.exception}, and on the way out {case.where(ranks[0])} (a finally or except block)"
        )
        + f" {_waiting(case, call, victims)}",
        suggestion=f"Fix the exception of {who} first, and make no collective calls in finally blocks.",
        since_s=state.since_s if state.since_s is not None else (call.issued_s if call else None),
    )


def absent_from_call(case: Case, call: CallRecord, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Ranks that are alive or ended well, but never made *call*."""
    world = case.world
    lane = world.lane(call)
    states = [world.states[r] for r in ranks]
    who = ranks_text(ranks)
    where = _plural(case.where(ranks[0]), ranks)
    met = sorted(lane.meetings.get(call.seq, {})) if lane else [call.rank]
    finished = all(s.phase is Phase.FINISHED for s in states)
    kind = Kind.MISSING_RANK
    culprits: Sequence[int] = ranks
    what = f"{who} never called {call_text(call)} on {group_text(call.group)}: {who} {where}."
    suggestion = f"Make every rank of {call.group.label or 'the group'} reach {place(call.site)}, or none."
    pending = [r for r in ranks if lane and call.seq in lane.meetings and r in lane.meetings[call.seq]]
    if finished and pending and lane is not None:
        kind = Kind.ASYNC_NEVER_WAITED
        own = lane.meetings[call.seq][pending[0]]
        culprits = pending
        what = (
            f"{ranks_text(pending)} started {call_text(own)} at {place(own.site)} without waiting for it, "
            f"and finished before it was done."
        )
        suggestion = (
            "Keep the handle that async_op=True returns and call wait() on it before the program ends."
        )
    elif finished and lane is not None:
        again = _earlier_at_same_line(lane.calls.get(call.rank, ()), call)
        too_many = len(met) * 2 < len(call.group.ranks)
        theirs = [r for r in lane.calls.get(ranks[0], ()) if r.site == call.site and r.op == call.op]
        if again and theirs and call.site is not None:
            kind = Kind.UNEVEN_ITERATIONS
            suggestion = "Give every rank the same number of iterations (drop_last, an even sampler) or use DDP's join()."
            what = (
                f"{ranks_text(met)} {are(met, 'is', 'are')} at call {len(again) + 1} of {call.op} at {place(call.site)}; "
                f"{who} finished after {len(theirs)}."
            )
        elif too_many:
            kind = Kind.EXTRA_COLLECTIVE
            what = f"{ranks_text(met)} called {call_text(call)} on {group_text(call.group)}; the other ranks finished without it."
            suggestion = f"Make the call at {place(call.site)} on every rank, or on none."
        if too_many:
            culprits, victims = met, ()
    tail = (
        _waiting(case, call, victims)
        if kind is not Kind.EXTRA_COLLECTIVE
        else "It waits for ranks that will never come."
    )
    return case.diagnosis(
        kind,
        culprits,
        [*victims, *([] if culprits is ranks else (r for r in met if r not in culprits))],
        call=call,
        explanation=f"{what[0].upper()}{what[1:]} {tail}",
        suggestion=suggestion,
        since_s=call.issued_s,
    )


def host_wait(case: Case, rank: int, victims: Sequence[int]) -> Diagnosis:
    """A rank that waits for something no call can bring: a lock, a queue, a store key nobody sets."""
    call = case.first_wait([rank])
    waits = case.world.waits(rank)
    on_store = any(isinstance(w, StoreWait) for w in waits)
    if call is not None and on_store:
        return absent_from_call(case, call, [rank], victims)
    text = f"rank {rank} {case.where(rank)}"
    what = next((w.what for w in waits if isinstance(w, HostWait)), "it")
    return case.diagnosis(
        Kind.HOST_STUCK,
        [rank],
        victims,
        call=call,
        explanation=f"{_sentence(text)} {_waiting(case, call, victims)}",
        suggestion=f"Nothing that still runs can end the wait for {what}: look at who should."
        if not on_store
        else "Nothing that still runs will set that key: look at who should.",
        since_s=case.world.states[rank].since_s,
    )


def _earlier_at_same_line(calls: Sequence[CallRecord], call: CallRecord) -> list[CallRecord]:
    return [r for r in calls if r.seq < call.seq and r.site == call.site and r.op == call.op]


def _waiting(case: Case, call: CallRecord | None, victims: Sequence[int]) -> str:
    if call is None:
        return "No other rank waits for it." if not victims else f"{_sentence(_wait_for(victims))}"
    inside = [
        r
        for r in victims
        if any(
            c.seq == call.seq and c.group == call.group and c.op == call.op for c in case.world.call_waits(r)
        )
    ]
    if call.is_p2p or not inside:
        return f"Rank {call.rank} waits in {call_text(call)} at {place(call.site)}."
    return (
        f"{ranks_text(inside)[0].upper()}{ranks_text(inside)[1:]} {are(inside, 'waits', 'wait')} in {call_text(call)} "
        f"on {group_text(call.group)}, at {place(call.site)}."
    )


def _wait_for(victims: Sequence[int]) -> str:
    return f"{ranks_text(victims)} {are(victims, 'waits', 'wait')} for it"


def _plural(text: str, ranks: Sequence[int]) -> str:
    """`is stopped` -> `are stopped` where several ranks do it."""
    if len(set(ranks)) == 1:
        return text
    for one, many in (
        ("has ", "have "),
        ("is ", "are "),
        ("was ", "were "),
        ("waits ", "wait "),
        ("runs", "run"),
    ):
        if text.startswith(one):
            return many + text[len(one) :]
    return text


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def waits_in_call(case: Case, rank: int) -> bool:
    return any(isinstance(w, CallWait) for w in case.world.waits(rank))
