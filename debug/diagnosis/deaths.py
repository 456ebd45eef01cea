"""Ranks that are gone or stuck by themselves: they raised, left, were killed, stopped, never joined."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.diagnosis.absence import absent_from_call
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.remote_calls import died_serving, gave_up
from distsim.debug.messages import (
    advice,
    are,
    capital,
    exception_line,
    raised_advice,
    ranks_text,
    several,
    site_text,
    some_ranks_text,
)
from distsim.debug.records import CallRecord, HostWait, Phase, StoreWait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["death", "host_wait", "in_flight_exception"]

_KIND = {
    Phase.RAISED: Kind.RANK_RAISED,
    Phase.FINISHED: Kind.RANK_EXITED,  # with an exit code of its own
    Phase.EXITED: Kind.RANK_EXITED,
    Phase.KILLED: Kind.RANK_KILLED,
    Phase.FROZEN: Kind.PROCESS_FROZEN,
    Phase.HOST_STUCK: Kind.HOST_STUCK,
    Phase.ABSENT: Kind.NEVER_JOINED,
}
_AT_THE_END = (
    "Nothing is lost but its exit code: a thread of torch or of another library outlived the interpreter. "
    "Let rank 0 end last (a barrier, then destroy_process_group()); its log has the last words."
)
FROM_OUTSIDE = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_UNSEEN = (
    "Look at its log, and at the kernel log of its host (out of memory). A process that another program has taken over "
    "(os.execv), or that C code ends, is gone like this, too."
)


def death(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Diagnose ranks with the same end: `rank_raised`, `rank_exited`, `rank_killed`, frozen, stuck or absent."""
    first = case.index.states[ranks[0]]
    if first.signal in FROM_OUTSIDE and not first.over and len(ranks) == case.index.evidence.world_size > 1:
        return _ended_from_outside(case, ranks)
    unseen = first.phase is Phase.KILLED and first.signal is None
    kind = Kind.RANK_EXITED if unseen else _KIND.get(first.phase, Kind.HOST_STUCK)
    call = case.first_wait(ranks)
    who = ranks_text(ranks)
    waiting = case.waiting(call, ranks, victims)
    if call is None:
        call = case.index.died_inside(ranks[0])
    subject = f"{who} {several(case.where(ranks[0]), ranks)}"
    sites = {rank: site for rank in ranks if (site := case.index.states[rank].site) is not None}
    return case.diagnosis(
        kind,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(subject)}.{gave_up(case, case.index.died_inside(ranks[0]))}"
        f"{died_serving(case, ranks[0])} {waiting}".rstrip(),
        suggestion=_AT_THE_END
        if first.over
        else _UNSEEN
        if unseen
        else raised_advice(
            some_ranks_text(ranks),
            first.exception or "",
            bool(victims),
            everyone=len(ranks) >= case.index.evidence.world_size,
            traceback=first.traceback or "",
        )
        if kind is Kind.RANK_RAISED
        else advice(kind, who=some_ranks_text(ranks)),
        since_s=first.since_s if first.since_s is not None else (call.issued_s if call else None),
        sites=sites,
    )


def _ended_from_outside(case: Case, ranks: Sequence[int]) -> Diagnosis:
    """Diagnose ranks that all got a signal by which people, launchers and schedulers end a job."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(site_text(case.site(rank), function=True), []).append(rank)
    signal = case.index.states[ranks[0]].signal
    where = "; ".join(f"{ranks_text(some)} {are(some, 'was', 'were')} at {at}" for at, some in places.items())
    return case.diagnosis(
        Kind.RANK_KILLED,
        ranks,
        (),
        call=None,
        explanation=f"All ranks were ended by {signal}, probably by a person, a launcher, a scheduler or a time limit. "
        f"{capital(where)}.",
        suggestion="If the job was stuck, look at where its ranks were. If it was not, nothing is wrong with them.",
        since_s=case.index.states[ranks[0]].since_s,
    )


def in_flight_exception(case: Case, ranks: Sequence[int], victims: Sequence[int], call: CallRecord | None) -> Diagnosis:
    """Diagnose ranks that raised and make further calls in a `finally` or `except` block."""
    state = case.index.states[ranks[0]]
    who = ranks_text(ranks)
    return case.diagnosis(
        Kind.RANK_RAISED,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(who)} raised {exception_line(state)}, and on the way out "
        f"{several(case.where(ranks[0]), ranks)} (a finally or except block). "
        f"{case.waiting(call, ranks, victims)}".rstrip(),
        suggestion=f"Fix the exception of {some_ranks_text(ranks)} first, and make no collective calls in finally "
        "blocks.",
        since_s=state.since_s if state.since_s is not None else (call.issued_s if call else None),
    )


def host_wait(case: Case, ranks: Sequence[int], victims: Sequence[int]) -> Diagnosis:
    """Diagnose ranks that wait for something that no call can bring: a lock, a queue, an unset store key."""
    call = case.first_wait(ranks)
    waits = case.index.waits(ranks[0])
    on_store = any(isinstance(w, StoreWait) for w in waits)
    if call is not None and on_store and not call.is_p2p:
        return absent_from_call(case, call, ranks, victims)
    waited_for = next((w.what for w in waits if isinstance(w, HostWait)), "it")
    return case.diagnosis(
        Kind.HOST_STUCK,
        ranks,
        victims,
        call=call,
        explanation=f"{capital(ranks_text(ranks))} {several(case.where(ranks[0]), ranks)}. "
        f"{case.waiting(call, ranks, victims)}".rstrip(),
        suggestion="No running rank will set that key: look at the rank that should."
        if on_store
        else f"No running rank can end the wait for {waited_for}: look at the rank that should.",
        since_s=case.index.states[ranks[0]].since_s,
    )
