"""Diagnoses unanswered remote calls: threads that wait for one another, a function that never ends, a silent worker."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.waits.wait_graph import RemoteNeed, Root
from distsim.debug.matching.index import Actor, rank_of
from distsim.debug.messages import call_text, capital, group_text, ranks_text, remote_text, site_text, worker_text
from distsim.debug.records import CallRecord, CallWait, Phase, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

SHOWN = 6
GAVE_UP = "RPC ran for more than set timeout"
"""Error message of torch for a call that exceeded its own timeout."""


def unanswered(case: Case, root: Root, victims: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of a root that has to do with remote calls."""
    actors = case.graph.actors_cycle(root.remote)
    if len(actors) > 1 or _link(case, actors[0], actors[0]) is not None:
        return _circle(case, actors, [*victims, *(rank_of(actor) for actor in root.remote), *root.ranks])
    served = case.index.remote.record(actors[0])
    if served is not None:
        return _still_served(case, served, victims)
    return _silent(case, actors[0], victims)


def _link(case: Case, actor: Actor, after: Actor) -> RemoteNeed | None:
    """Return the wait of one actor for another."""
    return next((need for need in case.graph.needs.get(actor, ()) if after in need.ranks), None)


def _circle(case: Case, actors: Sequence[Actor], others: Sequence[int]) -> Diagnosis:
    steps, sites, calls, busy = [], dict[int, Site](), list[CallRecord](), False
    for actor, after in zip(actors, (*actors[1:], actors[0]), strict=True):
        need = _link(case, actor, after)
        if need is None or not isinstance(need.wait, CallWait):
            continue
        call = need.wait.record
        calls.append(call)
        if call.site is not None and not (isinstance(actor, int) and rank_of(actor) in sites):
            sites[rank_of(actor)] = call.site
        steps.append(f"{_who(case, actor)} waits in {_call(call)}, at {site_text(call.site)}{_why(case, call, need)}")
        busy = busy or need.any_of
    if len(steps) > SHOWN:
        steps = [*steps[: SHOWN - 1], f"and so on over {len(steps) - SHOWN} more threads", steps[-1]]
    ranks = tuple(dict.fromkeys(map(rank_of, actors)))
    first = min(calls, key=lambda call: (call.rank, call.index), default=None)
    return case.diagnosis(
        Kind.DEADLOCK_CYCLE,
        ranks,
        others,
        call=first,
        explanation=f"Remote calls of {ranks_text(ranks)} wait for one another in a circle. "
        f"{capital('; '.join(steps))}.",
        suggestion=(
            "Give the workers more threads than calls can wait for one another (num_worker_threads), or have the inner "
            "call free its thread: @rpc.functions.async_execution, and return rpc_async(...).then(...)."
            if busy
            else "A function must not wait for something that its caller does only after the function has returned."
        ),
        since_s=max((call.issued_s for call in calls), default=None),
        cycle=ranks,
        sites=sites,
    )


def _who(case: Case, actor: Actor) -> str:
    if isinstance(actor, int):
        name = case.index.remote.name(actor)
        return f"the program of rank {actor}" if name is None else f"the program of {name} (rank {actor})"
    served = case.index.remote.record(actor)
    if served is None:
        return f"the agent of rank {rank_of(actor)}"
    return f"at {_worker(case.index.remote.name(served.rank), served.rank)} the thread that serves {_for(served)}"


def _worker(name: str | None, rank: int) -> str:
    return worker_text(name or "?", rank)


def _for(served: CallRecord) -> str:
    remote = served.remote
    return remote_text(served) if remote is None else f"{remote.function or 'a call'} for {remote.caller}"


def _call(call: CallRecord) -> str:
    return call_text(call) if call.is_of_two else f"{call_text(call)} on {group_text(call.group)}"


def _why(case: Case, call: CallRecord, need: RemoteNeed) -> str:
    """Return why the call is not answered, if its function does not wait."""
    if not need.any_of:
        return ""
    rank = rank_of(need.ranks[0])
    num = len(need.ranks)
    threads = "only thread is" if num == 1 else f"{num} threads are all"
    name = case.index.remote.name(rank) or f"rank {rank}"
    return (
        f", and no thread of its own is free to take the reply (its {threads} busy)"
        if rank == call.rank and call.peer != rank
        else f", and {name} has no thread free to begin it (its {threads} busy)"
    )


def _awaited(case: Case, actor: Actor) -> str:
    """Return the sentence about the ranks that wait for the rank."""
    waiting = [
        (rank, need.wait.record) for rank, need in case.graph.waiters_on([actor]) if isinstance(need.wait, CallWait)
    ]
    if not waiting:
        return ""
    rank, call = waiting[0]
    more = len({other for other, _ in waiting}) - 1
    others = f", and {more} more {'rank' if more == 1 else 'ranks'} with it" if more else ""
    return f" Rank {rank} waits for that in {_call(call)}, at {site_text(call.site)}{others}."


def _still_served(case: Case, served: CallRecord, victims: Sequence[int]) -> Diagnosis:
    request = case.index.remote.request(served) or served
    age_s = case.age_s(served.issued_s)
    how_long = "" if age_s is None or age_s < 0.1 else f" for {age_s:.1f} s"
    name = _worker(case.index.remote.name(served.rank), served.rank)
    kept = " An RRef is to hold its value: until it does, shutdown cannot free it." if request.op == "remote" else ""
    stands = "the future that it returned is not set" if served.is_async else "it has not come back"
    return case.diagnosis(
        Kind.HOST_STUCK,
        [served.rank],
        victims,
        call=request,
        explanation=f"Worker {name} has run {_for(served)}{how_long}, and {stands}: it is at "
        f"{site_text(served.site, function=True)}."
        f"{_awaited(case, ('serving', served.rank, served.index))}{kept}",
        suggestion="Look at what that line waits for: no remote call or collective of its own keeps it there. "
        "timeout= bounds how long a caller waits.",
        since_s=served.issued_s,
        sites={} if served.site is None else {served.rank: served.site},
    )


def _silent(case: Case, actor: Actor, victims: Sequence[int]) -> Diagnosis:
    rank = rank_of(actor)
    waiting = [need.wait.record for _, need in case.graph.waiters_on([actor]) if isinstance(need.wait, CallWait)]
    first = min(waiting, key=lambda call: call.issued_s, default=None)
    called = first.remote.callee if first is not None and first.remote is not None else None
    name = _worker(case.index.remote.name(rank) or called, rank)  # it may have noted nothing itself
    age_s = None if first is None else case.age_s(first.issued_s)
    how_long = "" if age_s is None else f" for {age_s:.1f} s"
    return case.diagnosis(
        Kind.HOST_STUCK,
        [rank],
        victims,
        call=first,
        explanation=f"Worker {name} has not answered{how_long}, though its process lives and no thread of it serves "
        f"the call: its program {case.where(rank)}.{_awaited(case, actor)}",
        suggestion="Check that its host can be reached from the caller's, and that the worker still runs RPC "
        "(shutdown(graceful=False) leaves calls unanswered).",
        since_s=None if first is None else first.issued_s,
    )


def calls_at_its_end(case: Case, rank: int) -> str:
    """Return the sentences about the remote calls that a rank made or served when it ended, or nothing."""
    return _gave_up(case, case.index.died_inside(rank)) + _died_serving(case, rank)


def _gave_up(case: Case, call: CallRecord | None) -> str:
    """Return the sentence about a remote call that its own timeout ended, and where the callee is instead. It is not
    a hang.
    """
    if call is None or call.remote is None or GAVE_UP not in (call.error or ""):
        return ""
    waited_s = None if call.completed_s is None else call.completed_s - call.issued_s
    after = "" if waited_s is None else f" after {waited_s:.1f} s"
    sentence = f" The call's own timeout ended it: it gave up on {call_text(call)}{after}"
    served = case.index.remote.served(call)
    if call.peer is None or served is None:
        return f"{sentence}."
    name = _worker(call.remote.callee, call.peer)
    if served.done:
        return f"{sentence}; {name} has answered since."
    return f"{sentence}; {name} is still in it, at {site_text(served.site, function=True)}."


def _died_serving(case: Case, rank: int) -> str:
    """Return the sentence about the calls that a rank was serving for others when it died."""
    served = case.index.remote.open.get(rank, [])
    if case.index.states[rank].phase is Phase.RAISED or not served:
        return ""
    more = f", and {len(served) - 1} more" if len(served) > 1 else ""
    return f" It was serving {_for(served[0])}, at {site_text(served[0].site, function=True)}{more}."
