"""Messages whose two ends the comparer suspects, held against the evidence.

`diagnose` pairs messages by counting, so it leaves out what has ended on ranks whose first calls are
overwritten. The comparer knows both ends of a message by their numbers: here they are judged by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.pairs.messages import Disagreement, disagreement
from distsim.debug.diagnosis.ranking import order
from distsim.debug.diagnosis.waits.wait_graph import WaitGraph
from distsim.debug.matching.agreement import check_pair
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.message_comparer import PAIR, StreamKey
from distsim.debug.records import CallRecord, Evidence, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["ends", "with_messages"]


def with_messages(found: Sequence[Diagnosis], evidence: Evidence, focus: Mapping[StreamKey, int]) -> list[Diagnosis]:
    """*found* and the suspected messages of *focus* that really do not fit, the root cause first."""
    pairs = [pair for key, number in focus.items() if (pair := _pair(evidence, key, number)) is not None]
    if not pairs:
        return list(found)
    index = EvidenceIndex(evidence)
    case = Case(index, WaitGraph(index, index.states), [], pairs)
    answer = list(found)
    told = {ends(diagnosis) for diagnosis in found}
    for pair in pairs:
        diagnosis = disagreement(case, pair, ())
        if ends(diagnosis) not in told:
            told.add(ends(diagnosis))
            answer.append(diagnosis)
    return order(index, answer)


def ends(diagnosis: Diagnosis) -> tuple[object, ...] | None:
    """What two diagnoses of one wrong pair of lines have in common; None: it is of no message's two ends."""
    if diagnosis.pair is None or diagnosis.kind not in (Kind.P2P_SIZE_MISMATCH, Kind.DTYPE_MISMATCH):
        return None
    return (diagnosis.kind, diagnosis.pair, *(diagnosis.sites.get(rank) for rank in diagnosis.pair))


def _pair(evidence: Evidence, key: StreamKey, index: int) -> Disagreement | None:
    mark, ranks, sent = key
    if mark != PAIR:
        return None
    send, recv = _call(evidence, ranks[0], sent), _call(evidence, ranks[1], index)
    if send is None or recv is None or (send.op, recv.op) != ("send", "recv"):
        return None
    if (send.peer, recv.peer, send.tag, send.group) != (recv.rank, send.rank, recv.tag, recv.group):
        return None  # of an earlier attempt: the numbers are the same
    if State.FAILED in (send.state, recv.state):
        return None  # who failed may never have met the other
    mismatch = check_pair(send, recv)
    return None if mismatch is None else (mismatch, send, recv)


def _call(evidence: Evidence, rank: int, index: int) -> CallRecord | None:
    return next((call for call in reversed(evidence.records.get(rank, ())) if call.index == index), None)
