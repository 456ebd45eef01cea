"""Exceptions that are only consequences of other ranks: a timeout, or a lost connection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from distsim.debug.records import CallRecord, Evidence, Phase, RankState, State

TIMEOUTS = re.compile(
    r"\b(?:timed out|time out|timing out|TimeoutError|"
    r"(?:wait|read|connect|connection|socket|operation|application) timeout)\b",
    re.IGNORECASE,
)
"""Error texts of gloo, NCCL's watchdog, c10d's stores and sockets about a wait that timed out."""
LOSSES = re.compile(
    r"\b(?:connection (?:was likely )?(?:closed|reset|refused|aborted|lost)|closed the connection|not connected|"
    r"broken pipe|failed to (?:recv|send)|remote (?:process|peer|server)|sockets?|SocketImpl|DistNetworkError|"
    r"EOF: end of file|eof \(this error|NCCL|ncclRemoteError|aborted|(?:failed to pass|reached) monitoredBarrier)\b",
    re.IGNORECASE,
)
"""Error texts of these, and of TensorPipe, about a lost peer.

They are whole phrases, because a user's own error may mention a pipeline or a peer.
"""

WORDS = 1_000
"""Number of characters by which two error texts are compared, because long texts are cut."""
USAGE = re.compile(r"\bnccl(?:InvalidUsage|InvalidArgument)\b|\bEADDRINUSE\b|\bEACCES\b|address already in use")
"""Error names of NCCL for a program's own mistake (its documentation, "ncclResult_t"), and of a port that c10d's store
cannot listen on.
"""

WATCHDOG = "DistBackendError: Watchdog caught collective operation timeout"
NOTICED_S = 3.0
"""Maximum seconds until it is noticed that a rank does not move."""
STUCK_S = 5.0
"""Minimum seconds for which a rank has not moved, if the others gave up on it. A timeout of two seconds proves nothing
of a rank that reads a file.
"""


def last_words(call: CallRecord | None, state: RankState) -> str | None:
    """Return the error of the call in which a rank died, or else the rank's last exception."""
    return (call.error if call is not None else None) or state.exception


def lost_in(calls: Sequence[CallRecord], state: RankState) -> CallRecord | None:
    """Return the call that failed because of another rank and from which the rank's exception comes, or None.

    It need not be the last call: a rank that waits for an asynchronous call may have made others since.
    """
    words = f"{state.traceback}\n{state.exception}\n{state.origins}"
    failed = [call for call in calls if call.state is State.FAILED and call.error and call.error in words]
    failed = [call for call in failed if aftermath(call.error) and not _got_over(call, calls)]
    blocking = [call for call in failed if not call.is_async]
    if blocking:
        return blocking[-1]
    waited = [call for call in failed if call.waited]
    if not waited:
        return next(iter(failed), None)  # one lost peer fails them all, waited for or not
    return next(call for call in waited if call.group == waited[-1].group)


def _got_over(lost: CallRecord, calls: Sequence[CallRecord]) -> bool:
    """Return whether the same thread has made a call since *lost* ended."""
    end_s = lost.completed_s
    return end_s is not None and any(
        call.state is State.COMPLETED and call.issued_s > end_s and call.thread == lost.thread for call in calls
    )


def unrelated(call: CallRecord, state: RankState) -> bool:
    """Return whether *call* failed because of another rank, although its rank raised for an unrelated reason.

    The rank had caught the loss and continued.
    """
    if state.origins is None or call.error is None or aftermath(state.exception):
        return False
    return aftermath(call.error) and call.error[:WORDS] not in state.origins


def timed_out(exception: str | None) -> bool:
    """Return whether an exception reports a timeout."""
    return exception is not None and TIMEOUTS.search(exception) is not None


def aftermath(exception: str | None) -> bool:
    """Return whether an exception was caused by another rank, judging by its text."""
    if exception is None or USAGE.search(exception) is not None:
        return False
    return timed_out(exception) or LOSSES.search(exception) is not None


def own_fault(exception: str | None) -> bool:
    """Return whether an exception was not caused by another rank."""
    return exception is not None and not aftermath(exception)


def as_timeouts(evidence: Evidence) -> Evidence:
    """Return *evidence* in which ranks that NCCL's watchdog has aborted raised its error in the call they waited in.

    It aborts for errors of CUDA, too: a call that is young, or lacks no member, is not one that timed out. Source:
    `checkTimeout` and `run` of the watchdog in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (2.13).
    """
    aborted = [state for state in evidence.ranks.values() if (state.phase, state.signal) == (Phase.KILLED, "SIGABRT")]
    ranks, records = dict(evidence.ranks), dict(evidence.records)
    for state in aborted:
        calls = evidence.records.get(state.rank, ())
        end_s = evidence.now_s if state.seen_s is None else state.seen_s
        waits = (call for call in calls if call.device == "cuda" and not call.done and end_s - call.issued_s >= STUCK_S)
        lost = next((call for call in waits if _lacks_members(evidence, call)), None)
        if lost is not None:
            failed = replace(lost, state=State.FAILED, error=WATCHDOG, completed_s=end_s)
            records[state.rank] = [failed if call is lost else call for call in calls]
            ranks[state.rank] = replace(state, phase=Phase.RAISED, exception=WATCHDOG, waits=())
    return replace(evidence, ranks=ranks, records=records) if aborted else evidence


def _lacks_members(evidence: Evidence, call: CallRecord) -> bool:
    """Return whether a member that this evidence is about has not made the call."""
    members = set(call.members) - evidence.unseen - {call.rank}
    calls = {rank: evidence.records.get(rank, ()) for rank in members}
    if call.is_p2p:
        return all(not one.is_p2p or one.peer != call.rank or one.done for rank in members for one in calls[rank])
    key = call.group, call.seq
    return any(all(one.is_p2p or (one.group, one.seq) != key for one in calls[rank]) for rank in members)


def given_up(evidence: Evidence) -> dict[int, CallRecord]:
    """Return the calls in which ranks waited until torch's timeout ended them by an exception, by rank."""
    evidence = as_timeouts(evidence)
    lost = {
        rank: lost_in(evidence.records.get(rank, ()), state)
        for rank, state in evidence.ranks.items()
        if state.phase is Phase.RAISED
    }
    return {
        rank: call
        for rank, call in lost.items()
        if call is not None and timed_out(call.error) and call.completed_s is not None
    }


def settle_given_up(evidence: Evidence) -> None:
    """Mark ranks as stuck that did not move, outside any call, while others waited until torch's timeout and raised.

    A rank that computed in that time was only too slow.
    """
    waited_s = max([0.0, *((call.completed_s or 0.0) - call.issued_s for call in given_up(evidence).values())])
    for state in evidence.ranks.values() if waited_s else ():
        still_s = max(state.idle_s or 0.0, state.silent_s or 0.0)
        if state.phase is Phase.RUNNING and not state.leaving and still_s >= max(STUCK_S, waited_s - NOTICED_S):
            state.phase = Phase.HOST_STUCK
            state.since_s = evidence.now_s - still_s
