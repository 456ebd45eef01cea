"""Ranks that wait in init_process_group, each at its own address, or at one where no store answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.waits.proof import Proof
from distsim.debug.records import CallRecord, Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.words.phrases import are, capital, ranks_text

__all__ = ["MEETING_S", "apart"]

MEETING_S = 3.0
"""All have waited for so long before anything is said of their addresses: processes start one after the other."""
INIT = "init_process_group"


def apart(case: Case) -> list[Diagnosis]:
    """Ranks that can not meet: a warning after some seconds, a hang when others have waited for `hang_after_s`.

    The address that most ranks have is taken for the right one, that of the lowest rank where there are as many.
    """
    evidence = case.index.evidence
    waiting = {rank: call for rank in case.index.states if (call := _meeting(case, rank)) is not None}
    if not waiting or evidence.hang_after_s is None:
        return []
    waited_s = min(evidence.watched_s(call.issued_s) for call in waiting.values())
    addresses = {rank: str(case.index.states[rank].meets_at) for rank in waiting}
    if waited_s < min(MEETING_S, evidence.hang_after_s) or len(waiting) > max(map(_size, waiting.values())):
        return []  # more than can meet are in several meetings
    proof = Proof.PATIENCE if waited_s >= evidence.hang_after_s else Proof.NOT_YET
    most = Counter(addresses[rank] for rank in sorted(waiting)).most_common(1)[0][0]
    if elsewhere := [rank for rank, address in addresses.items() if address != most]:
        return [replace(_elsewhere(case, waiting, addresses, most, elsewhere), proof=proof)]
    if any(case.index.states[rank].reached_store for rank in waiting) or 0 not in waiting:
        return []  # rank 0, where the store is to be, may still come
    return [replace(_unserved(case, waiting, most), proof=proof)]


def _meeting(case: Case, rank: int) -> CallRecord | None:
    """The rendezvous that a rank waits in."""
    state = case.index.states[rank]
    if state.phase is not Phase.BLOCKED or state.meets_at is None:
        return None
    return next((call for call in case.index.call_waits(rank) if call.op == INIT), None)


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
    what = "MASTER_PORT" if len(hosts) == 1 else "MASTER_ADDR"
    return _never_joined(
        case,
        waiting,
        elsewhere,
        f"{capital(ranks_text(elsewhere))} can not meet the others in init_process_group, where each rank calls the "
        f"store at MASTER_ADDR:MASTER_PORT: {'; '.join(listed)}.",
        f"Give every rank the same {what}: choose it once, on one host (torchrun does), and pass it to all.",
    )


def _unserved(case: Case, waiting: Mapping[int, CallRecord], address: str) -> Diagnosis:
    return _never_joined(
        case,
        waiting,
        list(waiting),
        f"{capital(ranks_text(waiting))} {are(waiting, 'has', 'have')} not reached the store at {address} in which the "
        "ranks meet in init_process_group: no process serves it, or its host does not answer or has another name.",
        f"Look whether {address} is the address of rank 0's host as the others see it, and a port that it listens on.",
    )


def _never_joined(
    case: Case, waiting: Mapping[int, CallRecord], culprits: Sequence[int], explanation: str, suggestion: str
) -> Diagnosis:
    return case.diagnosis(
        Kind.NEVER_JOINED,
        culprits,
        [rank for rank in waiting if rank not in culprits],
        call=waiting[culprits[0]],
        explanation=explanation,
        suggestion=suggestion,
        since_s=min(call.issued_s for call in waiting.values()),
    )
