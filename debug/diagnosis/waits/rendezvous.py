"""Diagnoses ranks that cannot meet in init_process_group because of their addresses, a store that does not respond, or
keys of an earlier run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.matching.secondary_errors import aftermath, last_words
from distsim.debug.messages import are, capital, ranks_text
from distsim.debug.records import CallRecord, Phase, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof

MEETING_S = 3.0
"""Seconds that all must have waited before their addresses are compared, because processes start one after the
other.
"""
INIT = "init_process_group"
STALE_FILE = (
    "Delete {path} before each run, give each run a file of its own, or leave init_method out under torchrun, which "
    "has a store for each run."
)
REUSED_STORE = (
    "Call init_process_group once and make further groups with new_group, or give each call keys of its own: "
    "init_process_group(backend, store=PrefixStore(str(n), store), rank=rank, world_size=world_size)."
)


def apart(case: Case) -> list[Diagnosis]:
    """Return diagnoses of ranks that cannot meet: a warning after some seconds, a hang after `hang_after_s`.

    The address that most ranks have counts as the right one; in a tie, that of the lowest rank.
    """
    evidence = case.index.evidence
    waiting = {rank: call for rank in case.index.states if (call := _meeting(case, rank)) is not None}
    if not waiting:
        return []
    limit_s = evidence.hang_after_s or 0.0  # a simulation has come to its end
    waited_s = min(evidence.watched_s(call.issued_s) for call in waiting.values())
    addresses = {rank: str(case.index.states[rank].meets_at) for rank in waiting}
    if waited_s < min(MEETING_S, limit_s) or len(waiting) > max(map(_size, waiting.values())):
        return []  # more than can meet are in several meetings
    gave_up = any(case.index.states[rank].phase is Phase.RAISED for rank in waiting)
    proof = Proof.PATIENCE if waited_s >= limit_s or gave_up else Proof.NOT_YET
    most = Counter(addresses[rank] for rank in sorted(waiting)).most_common(1)[0][0]
    if elsewhere := [rank for rank, address in addresses.items() if address != most]:
        return [replace(_elsewhere(case, waiting, addresses, most, elsewhere), proof=proof)]
    lost = [rank for rank in waiting if not case.index.states[rank].reached_store]
    if len(lost) < len(waiting) or len(waiting) < max(map(_size, waiting.values())):
        # Rank 0 serves the store, and TCPStore() returns there only when all have come (TCPStore::waitForWorkers).
        lost = [rank for rank in lost if rank != 0]
    if not lost or 0 not in waiting:
        return []  # rank 0, where the store is to be, may still come
    return [replace(_unreached(case, waiting, most, lost), proof=proof)]


def stale_addresses(case: Case) -> list[Diagnosis]:
    """Find ranks that cannot connect because the store holds keys of an earlier `init_process_group` or, in a file, of
    an earlier job.

    gloo finds the addresses of a group that is gone under the same keys, and connects to them, waits for them, or loses
    them in its first call; which rank meets them first is chance.
    """
    evidence, states = case.index.evidence, case.index.states
    members = [rank for rank, state in states.items() if state.reused_store is not None]
    begun = {rank: call for rank in members if (call := _last_init(case, rank)) is not None}
    where = next((str(states[rank].reused_store) for rank in begun), "")
    in_file, all_came = where.startswith("/"), True
    if in_file:  # who comes later finds keys of the ranks before it there
        group = next(iter(begun.values())).group
        together = {rank: call for rank in group.ranks if (call := _last_init(case, rank)) is not None}
        if min(together, key=lambda rank: together[rank].issued_s) not in begun:
            return []
        begun, all_came = together, len(together) == len(group.ranks)
    if not begun or any(_has_connected(case, call) for call in begun.values()):
        return []
    failed = [rank for rank in begun if _lost(case, rank)]
    waiting = [rank for rank, call in begun.items() if not call.done and states[rank].phase is Phase.BLOCKED]
    waited_s = min((evidence.watched_s(begun[rank].issued_s) for rank in waiting), default=0.0)
    is_over = all_came and len(waiting) == len(begun) and waited_s >= (evidence.hang_after_s or 0.0)
    if not failed and not is_over:
        return []
    culprits = waiting or failed
    text = f"{capital(ranks_text(culprits))} could not connect to the others in {INIT}"
    if in_file:
        text += f": {where} was written before these ranks started, as an earlier run leaves it that did not end "
        text += "normally, with its addresses."
    else:
        text += f", which the program calls again in one job: the store at {where} still holds the addresses of the "
        text += "process group that is gone."
    cure = STALE_FILE.format(path=where) if in_file else REUSED_STORE
    diagnosis = _never_joined(case, begun, culprits, text, cure)
    return [replace(diagnosis, proof=Proof.GONE if failed else Proof.PATIENCE)]


def _last_init(case: Case, rank: int) -> CallRecord | None:
    return next((call for call in reversed(case.index.records(rank)) if call.op == INIT), None)


def _has_connected(case: Case, init: CallRecord) -> bool:
    """Return whether a call of the new group has completed on this rank."""
    calls = case.index.records(init.rank)
    return any(call.state is State.COMPLETED and call.index > init.index for call in calls)


def _lost(case: Case, rank: int) -> bool:
    """Return whether the rank raised gloo's error about a lost peer."""
    state = case.index.states[rank]
    words = last_words(case.index.died_inside(rank), state)
    return state.phase is Phase.RAISED and (aftermath(words) or "connectFullMesh" in str(state.exception))


def follows(diagnosis: Diagnosis, meeting: Sequence[Diagnosis]) -> bool:
    """Return whether a diagnosis only reports ranks that waited, or gave up, in a *meeting* that cannot take place."""
    ranks = {rank for d in meeting for rank in (*d.culprits, *d.victims)}
    return diagnosis.kind in (Kind.RANK_RAISED, Kind.NEVER_JOINED, Kind.MISSING_RANK) and ranks.issuperset(
        diagnosis.culprits
    )


def _meeting(case: Case, rank: int) -> CallRecord | None:
    """Return the rendezvous that a rank waits in, or has waited in until it gave up."""
    state = case.index.states[rank]
    if state.phase not in (Phase.BLOCKED, Phase.RAISED) or state.meets_at is None:
        return None
    call = case.index.died_inside(rank) if state.phase is Phase.RAISED else case.index.last(rank)
    if call is None or call.op != INIT or (state.phase is Phase.BLOCKED and call.done):
        return None
    return call if state.phase is Phase.BLOCKED or aftermath(last_words(call, state)) else None


def _size(call: CallRecord) -> int:
    return len(call.group.ranks)


def _elsewhere(
    case: Case,
    waiting: Mapping[int, CallRecord],
    addresses: Mapping[int, str],
    most: str,
    elsewhere: Sequence[int],
) -> Diagnosis:
    others = [rank for rank in waiting if rank not in elsewhere]
    by_address: dict[str, list[int]] = {}
    for rank in (*elsewhere, *others):
        by_address.setdefault(addresses[rank], []).append(rank)
    listed = [f"{ranks_text(some)} {are(some, 'calls', 'call')} {at}" for at, some in by_address.items()]
    hosts = {address.rpartition(":")[0] for address in by_address}
    setting = "port (MASTER_PORT" if len(hosts) == 1 else "address (MASTER_ADDR"
    return _never_joined(
        case,
        waiting,
        elsewhere,
        f"{capital(ranks_text(elsewhere))} can not meet the others in init_process_group, where each rank calls the "
        f"store at the MASTER_ADDR:MASTER_PORT of its environment, or of its init_method: {'; '.join(listed)}.",
        f"Give every rank the same {setting}, or that in init_method): choose it once, on one host (torchrun does), "
        "and pass it to all.",
    )


def _unreached(case: Case, waiting: Mapping[int, CallRecord], address: str, lost: Sequence[int]) -> Diagnosis:
    others = [rank for rank in waiting if case.index.states[rank].reached_store]
    has = are(lost, "has", "have")
    text = f"{capital(ranks_text(lost))} {has} not reached the store at {address} in which the ranks meet in {INIT}"
    if others:
        text += (
            f", as {ranks_text(others)} {are(others, 'has', 'have')}: that name may mean another host there, or the "
        )
        text += "network between them is closed."
    else:
        text += ": no process serves it, or its host does not answer or has another name."
    return _never_joined(
        case,
        waiting,
        lost,
        text,
        f"Check whether {address} is the address of rank 0's host as every other host sees it (127.0.0.1, localhost "
        "and its own name mean a different host on each), and whether the port is open.",
    )


def _never_joined(
    case: Case, waiting: Mapping[int, CallRecord], culprits: Sequence[int], explanation: str, suggestion: str
) -> Diagnosis:
    diagnosis = case.diagnosis(
        Kind.NEVER_JOINED,
        culprits,
        [rank for rank in waiting if rank not in culprits],
        call=waiting[culprits[0]],
        explanation=explanation,
        suggestion=suggestion,
        since_s=min(call.issued_s for call in waiting.values()),
    )
    unseen = case.index.evidence.unseen.intersection(waiting[culprits[0]].group.ranks)
    return replace(diagnosis, group=None) if unseen else diagnosis  # its members are numbers of nobody
