"""Running ranks that others wait for: expected to come, stragglers, or missing.

A running rank is not a hang. Others may wait `Evidence.straggler_after_s` for it before it is
named a straggler (a warning), and `Evidence.hang_after_s` before it counts as missing; where these
are None, a running rank is trusted for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.waits.assess_proof import longest_waits
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.messages import advice, are, call_text, capital, group_text, place, ranks_text, some_ranks_text
from distsim.debug.records import CallRecord, Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["lateness", "patience"]

INIT = "init_process_group"


def lateness(index: EvidenceIndex) -> dict[int, CallRecord]:
    """Running ranks -> the call that others have waited in for them the longest."""
    unseen = index.evidence.unseen
    running = [rank for rank, state in index.states.items() if state.phase is Phase.RUNNING and rank not in unseen]
    if not running or (index.evidence.straggler_after_s is None and index.evidence.hang_after_s is None):
        return {}
    return longest_waits(index, running)


def patience(
    index: EvidenceIndex, late: Mapping[int, CallRecord]
) -> tuple[list[int], Callable[[Case], list[Diagnosis]]]:
    """The running ranks that are still trusted, and the stragglers among them as diagnoses."""
    evidence = index.evidence
    # The last beat of a dead job may be older than its last call.
    age = {rank: evidence.watched_s(call.issued_s) for rank, call in late.items()}
    missing = {r for r, s in age.items() if evidence.hang_after_s is not None and s >= evidence.hang_after_s}
    slow = [
        r
        for r, s in age.items()
        if r not in missing and evidence.straggler_after_s is not None and s >= evidence.straggler_after_s
    ]
    moving = [r for r, s in index.states.items() if s.phase is Phase.RUNNING and r not in missing]

    def stragglers(case: Case) -> list[Diagnosis]:
        by_call: dict[tuple[str, str, int, bool], tuple[CallRecord, list[int]]] = {}
        for rank in sorted(slow):
            call = late[rank]
            unseen = call.op == INIT and index.states[rank].host is None
            by_call.setdefault((call.op, call.group.name, call.seq, unseen), (call, []))[1].append(rank)
        found = []
        for (*_, unseen), (call, ranks) in by_call.items():
            waiting = [
                r
                for r in index.states
                for c in index.call_waits(r)
                if (c.op, c.seq, c.group) == (call.op, call.seq, call.group)
            ]
            who, num = ranks_text(ranks), len(set(waiting))
            kind = Kind.NEVER_JOINED if unseen else Kind.STRAGGLER
            if unseen:  # its host may still be booting, and its launcher another one
                late_text = (
                    f"{capital(who)} {are(ranks, 'has', 'have')} not joined {group_text(call.group)} so far, and "
                )
                late_text += "no process of theirs is known here"
            else:
                late_text = f"{capital(who)} {are(ranks, 'is', 'are')} late for {_awaited(call)} on "
                late_text += f"{group_text(call.group)} but still {are(ranks, 'runs', 'run')}{_where(index, ranks[0])}"
            found.append(
                case.diagnosis(
                    kind,
                    ranks,
                    waiting,
                    call=call,
                    explanation=f"{late_text}. "
                    f"{num} {'rank waits' if num == 1 else 'ranks wait'} at {place(call.site)} for "
                    f"{evidence.now_s - call.issued_s:.1f} s so far.",
                    suggestion=advice(kind, who=some_ranks_text(ranks)),
                    since_s=call.issued_s,
                )
            )
        return found

    return moving, stragglers


def _awaited(call: CallRecord) -> str:
    """What a late rank is to do: a message is the other end's call, not its own."""
    return f"rank {call.rank}'s {call_text(call)}" if call.is_of_two else call_text(call)


def _where(index: EvidenceIndex, rank: int) -> str:
    """Where it is; where nobody knows that, where it was last."""
    at, last = index.states[rank].site, index.last(rank)
    if at is not None:
        return f", at {place(at)}"
    return "" if last is None or last.site is None else f"; its last call was {call_text(last)} at {place(last.site)}"
