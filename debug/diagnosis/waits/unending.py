"""Calls that every rank has reached and that do not end: the transfer itself is stuck, or very slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.waits.proof import Proof
from distsim.debug.messages.phrases import are, call_text, capital, group_text, place, ranks_text
from distsim.debug.records import CallRecord, Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["unending"]

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


def unending(case: Case, others: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Calls that have lasted `hang_after_s` though no rank is missing, and that none of *others* explains.

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
    return [_diagnosis(case, records) for key, records in calls.items() if key in late]


def _diagnosis(case: Case, records: Sequence[CallRecord]) -> Diagnosis:
    first = min(records, key=lambda call: call.issued_s)
    ranks = [call.rank for call in records]
    waited_s = case.index.evidence.watched_s(first.issued_s)
    text = f"{capital(ranks_text(ranks))} {are(ranks, 'has', 'have')} waited in {call_text(first)} "
    if first.is_of_two:
        text += f"at {place(first.site)} for {waited_s:.0f} s, though the other end has been called, too."
    else:
        text += f"on {group_text(first.group)}, at {place(first.site)}, for {waited_s:.0f} s, though every rank has "
        text += "come to it."
    is_init = first.op == INIT
    is_over = is_init and case.index.evidence.quiet_after_s is not None
    if is_init:
        text += " Connecting is slow, or goes to addresses that an earlier run, or another job, left in the store."
        suggestion = OLD_ADDRESSES
    else:
        text += " The transfer does not end, or is slow. Nothing proves that it cannot go on: the job is left alone."
        suggestion = ON_HOSTS if first.device == "cpu" else ON_GPUS
    found = case.diagnosis(
        Kind.NEVER_JOINED if is_init else Kind.NETWORK_FAULT,
        ranks,
        (),
        call=first,
        explanation=text,
        suggestion=suggestion,
        since_s=first.issued_s,
    )
    return replace(found, proof=Proof.PATIENCE if is_over else Proof.NOT_YET)
