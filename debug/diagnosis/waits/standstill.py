"""Diagnoses jobs that make no progress although no rank is missing from a call.

Either no rank waits in a call (each is stuck on its own host, or computes for long), or every rank has reached a
call that does not end: the transfer itself is stuck, or very slow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.messages import (
    advice,
    are,
    call_text,
    capital,
    group_text,
    ranks_text,
    several,
    site_text,
    some_ranks_text,
    state_text,
)
from distsim.debug.records import CallRecord, Phase, RankState
from distsim.debug.records.diagnosis import Diagnosis, Stuck
from distsim.debug.records.kinds import Kind, Proof

IDLE_S = 5.0
"""Seconds without any activity of all ranks before a warning."""
RECENT_S = 2.0
"""A rank that has not computed for so long does not compute now: it is sampled once a second."""
MOST_PLACES = 6
COMPUTE = "They still compute"
ASLEEP = "Their main threads sleep, and only other threads or child processes of theirs work"
LEFT_ALONE = "The job is not ended: set --hang-after to end a job after so long without a call."
NO_PROOF = "This is not proof that they never end: it is a hang by the limit you set (--hang-after)."
BY_THE_LIMIT = "It is a hang by the limit you set (--hang-after)."
STANDS_STILL = (
    "Look at the stacks: what the ranks wait for there (a file system, a queue, a lock, a worker, a process, input) "
    "has to arrive before the job can continue."
)
COMPUTES = (
    "Look at the stacks: a loop there may wait for something that never happens. If the work only takes long, "
    "set --hang-after to a longer time."
)
ENDED = frozenset({Phase.FINISHED, Phase.EXITED})
"""Phases of ranks that have left a job in which the others may continue."""
INIT = "init_process_group"
ON_HOSTS = (
    "Look at the network between the hosts: a ping, a firewall, retransmissions (ss -ti), errors of the NIC (ethtool "
    "-S), the interface that was chosen (GLOO_SOCKET_IFNAME)."
)
ON_GPUS = (
    "Ask NCCL where its ranks are (ncclras, since NCCL 2.24; NCCL_DEBUG=INFO), then look at the GPUs (nvidia-smi, Xid "
    "errors in dmesg) and the network (ibstat, ethtool -S)."
)
OLD_ADDRESSES = (
    "Give each job a store of its own: another port, a file of its own that no earlier run has left. If the store is "
    "new, look at the network between the hosts (GLOO_SOCKET_IFNAME)."
)


def idle_job(case: Case) -> list[Diagnosis]:
    """Diagnose the ranks of a live job in which no rank waits and none has made a call for long.

    Ranks without activity become a hang after `hang_after_s`. Ranks that compute are then a warning: their
    computation may be long, and no rank waits for it. They become a hang only after `quiet_after_s`, the user's own
    limit, and only if several of them are in a watched group: a rank that never joined a group, is alone in it or
    has left it owes no call.
    """
    evidence = case.index.evidence
    limit_s = evidence.hang_after_s
    live = {r: s for r, s in case.index.states.items() if s.phase not in ENDED and (s.through or not s.leaving)}
    live = {rank: state for rank, state in live.items() if rank not in evidence.unseen}
    if not limit_s or not live or any(not _on_its_own(case, state) for state in live.values()):
        return []
    still_s = _still_s(live.values(), evidence.unseen)
    shown = [rank for rank, state in live.items() if not state.left_group]
    quiet_s = min((_quiet_s(case, rank) for rank in shown or live), default=0.0)
    members = [rank for rank in shown if not live[rank].joining]
    is_over = len(members) > 1 and evidence.quiet_after_s is not None and quiet_s >= evidence.quiet_after_s
    suggestion = STANDS_STILL
    if still_s >= (limit_s if is_over else min(IDLE_S, limit_s)):
        text = f"No rank waits in a call, and none has moved for {still_s:.0f} s"
        trusted = bool(evidence.unseen) and evidence.quiet_after_s is None  # processes that are not watched may come
        proof = Proof.PATIENCE if still_s >= limit_s and not trusted else Proof.NOT_YET
        then = "" if proof is Proof.PATIENCE else f" It counts as a hang after {limit_s:g} s of this (--hang-after)."
        then = f" {LEFT_ALONE}" if trusted else then
    elif quiet_s >= limit_s and shown:
        text = f"No rank has made a call for {quiet_s:.0f} s, and none waits in one"
        proof = Proof.PATIENCE if is_over else Proof.NOT_YET
        live = {rank: live[rank] for rank in (members if is_over else shown)}
        activity, then, suggestion = _activity(live.values(), is_over, evidence.unseen)
        text += activity
    else:
        return []
    joining = [rank for rank, state in live.items() if state.joining]
    meeting, absent = _meeting(case, live)
    others = [rank for rank in live if rank not in joining and rank not in meeting]
    parts = ((Kind.HOST_STUCK, others), (Kind.NEVER_JOINED, joining))
    diagnoses = [_diagnosis(case, kind, ranks, text, then, suggestion, quiet_s) for kind, ranks in parts if ranks]
    if absent:
        diagnoses.append(_absent(case, absent, meeting, text, then, quiet_s))
    return [replace(d, proof=proof) for d in diagnoses]


def _meeting(case: Case, live: Mapping[int, RankState]) -> tuple[list[int], list[int]]:
    """Return ranks of *live* that wait in a rendezvous outside init_process_group, and its missing members without a
    known process."""
    evidence = case.index.evidence
    stores = {rank: at.partition(" ")[0] for rank, state in live.items() if (at := state.meets_by_hand) is not None}
    absent = {
        rank: store
        for rank in sorted(evidence.unseen & case.index.states.keys())
        for store in set(stores.values())
        if f" at {store}" in evidence.processes.get(rank, "")
    }
    return [rank for rank, store in stores.items() if store in absent.values()], list(absent)


def _absent(
    case: Case, absent: Sequence[int], meeting: Sequence[int], text: str, then: str, since_s: float
) -> Diagnosis:
    states = case.index.states
    at = str(states[meeting[0]].meets_by_hand).partition(" ")[0]
    diagnosis = case.diagnosis(
        Kind.NEVER_JOINED,
        absent,
        (),
        call=None,
        explanation=f"{capital(ranks_text(absent))} {are(absent, 'has', 'have')} not come to the rendezvous at {at}, "
        f"which the program makes beside init_process_group, and no process of theirs is known here. {text}: "
        f"{_places(case, meeting)}.{then}",
        suggestion="Start the missing ranks, or pass the world_size of those that are started. "
        + advice(Kind.NEVER_JOINED, who=some_ranks_text(absent)),
        since_s=case.index.evidence.now_s - since_s,
        sites=case.sites(meeting),
    )
    stuck = {
        rank: Stuck("rendezvous", (), None, site.file if site else None, site.line if site else None)
        for rank in meeting
        for site in (states[rank].site,)
    }
    return replace(diagnosis, stuck=stuck)


def _still_s(states: Iterable[RankState], unseen: Collection[int]) -> float:
    """Return seconds for which none of *states* has moved. Threads of the store and of gloo ask for *unseen* ranks
    again and again, while the main thread sleeps in a rendezvous.
    """
    return min(
        max(s.idle_s or 0.0, s.silent_s or 0.0, (s.asleep_s or 0.0) if unseen and s.meets_by_hand else 0.0)
        for s in states
    )


def _activity(states: Collection[RankState], is_over: bool, unseen: Collection[int]) -> tuple[str, str, str]:
    """Return what ranks without recent calls are doing, the consequence, and a suggestion."""
    still_s = _still_s(states, unseen)
    if still_s >= RECENT_S:
        return f"; none has moved for {still_s:.0f} s", f" {BY_THE_LIMIT if is_over else LEFT_ALONE}", STANDS_STILL
    asleep = min(state.asleep_s or 0.0 for state in states) >= RECENT_S
    then = f" {ASLEEP if asleep else COMPUTE}. {NO_PROOF if is_over else LEFT_ALONE}"
    return "", then, STANDS_STILL if asleep else COMPUTES


def _on_its_own(case: Case, state: RankState) -> bool:
    """Return whether the rank runs on a host that is watched, and waits for no other."""
    return (
        state.phase in (Phase.RUNNING, Phase.HOST_STUCK)
        and state.idle_s is not None
        and not case.index.call_waits(state.rank)
    )


def _quiet_s(case: Case, rank: int) -> float:
    last_s = max((call.completed_s or call.issued_s for call in case.index.records(rank)), default=0.0)
    return case.index.evidence.watched_s(last_s)


def _diagnosis(
    case: Case, kind: Kind, ranks: Sequence[int], text: str, then: str, suggestion: str, since_s: float
) -> Diagnosis:
    before = " They have not reached init_process_group." if kind is Kind.NEVER_JOINED else ""
    return case.diagnosis(
        kind,
        ranks,
        (),
        call=None,
        explanation=f"{text}: {_places(case, ranks)}.{before}{then}",
        suggestion=suggestion,
        since_s=case.index.evidence.now_s - since_s,
    )


def _places(case: Case, ranks: Iterable[int]) -> str:
    """Return the first places of *ranks*, each with its ranks."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        state = case.index.states[rank]
        where = state_text(state, (), case.index.last(rank))
        if state.silent_s is not None:
            where += ", in a call that holds the GIL"
        places.setdefault(where, []).append(rank)
    listed = [f"{ranks_text(some)} {several(where, some)}" for where, some in list(places.items())[:MOST_PLACES]]
    if len(places) > MOST_PLACES:
        listed.append(f"the others are in {len(places) - MOST_PLACES} more places")
    return "; ".join(listed)


def unending(case: Case, others: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Return calls that have lasted `hang_after_s` though no rank is missing, and that none of *others* explains.

    A transfer may only be slow, and so may connecting thousands of ranks: this is a warning. init_process_group
    transfers nothing, and is a hang after the limit that the user has set (`quiet_after_s`).
    """
    limit_s = case.index.evidence.hang_after_s
    if not limit_s:
        return []
    explained = {rank for d in others if d.kind is not Kind.STRAGGLER for rank in (*d.culprits, *d.victims)}
    calls: dict[tuple[object, ...], list[CallRecord]] = {}
    late: set[tuple[object, ...]] = set()
    for rank, state in case.index.states.items():
        if state.phase is not Phase.BLOCKED or state.at_large or rank in case.graph.needs:
            continue
        for call in case.index.call_waits(rank):
            if call.remote is not None or not explained.isdisjoint((rank, *call.members)):
                continue
            key = (call.op, call.seq, call.group, call.is_p2p and rank)
            calls.setdefault(key, []).append(call)
            if case.index.evidence.watched_s(call.issued_s) >= limit_s:
                late.add(key)
    return [_unending(case, records) for key, records in calls.items() if key in late]


def _unending(case: Case, records: Sequence[CallRecord]) -> Diagnosis:
    first = min(records, key=lambda call: call.issued_s)
    ranks = [call.rank for call in records]
    waited_s = case.index.evidence.watched_s(first.issued_s)
    text = f"{capital(ranks_text(ranks))} {are(ranks, 'has', 'have')} waited in {call_text(first)} "
    if first.is_of_two:
        text += f"at {site_text(first.site)} for {waited_s:.0f} s, though the other end has been called, too."
    else:
        text += (
            f"on {group_text(first.group)}, at {site_text(first.site)}, for {waited_s:.0f} s, though every rank has "
        )
        text += "come to it."
    is_init = first.op == INIT
    is_over = is_init and case.index.evidence.quiet_after_s is not None
    if is_init:
        text += " Connecting is slow, or goes to addresses that an earlier run, or another job, left in the store."
        suggestion = OLD_ADDRESSES
    else:
        text += " The transfer is slow or stuck. There is no proof that it cannot complete, so the job is not ended."
        suggestion = ON_HOSTS if first.device == "cpu" else ON_GPUS
    diagnosis = case.diagnosis(
        Kind.NEVER_JOINED if is_init else Kind.NETWORK_FAULT,
        ranks,
        (),
        call=first,
        explanation=text,
        suggestion=suggestion,
    )
    return replace(diagnosis, proof=Proof.PATIENCE if is_over else Proof.NOT_YET)
