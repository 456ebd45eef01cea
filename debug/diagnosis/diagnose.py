"""Diagnoses evidence, root cause first. Pure: no I/O, no clock, no torch.

`explain` is imported only if a run has a fault, because most runs end without one.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.divergence.divergence import Divergence
from distsim.debug.divergence.find import find_divergences
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.secondary_errors import as_timeouts
from distsim.debug.records import Evidence, Phase, RankState
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.obligations import RECOVERIES

SUCCESSFUL_ENDS = {(Phase.FINISHED, None), (Phase.FINISHED, 0), (Phase.EXITED, 0)}
"""Phases and exit codes of ranks that have ended without an error."""
ENDED_FROM_OUTSIDE = (Phase.KILLED, Phase.RAISED, Phase.EXITED)
"""Phases of ranks that a signal may have ended; the program may handle it."""


def diagnose(evidence: Evidence, *, nothing_moves: bool = False) -> list[Diagnosis]:
    """Return the diagnoses, the root cause first; empty if nothing is wrong.

    If *nothing_moves* any more (at the end of a simulation), blocked ranks are reported even without a known reason.
    """
    if any(call.op in RECOVERIES for calls in evidence.records.values() for call in calls):
        from distsim.debug.diagnosis.causes.recovery import left_behind

        evidence = left_behind(evidence)
    if evidence.all_ended or any(state.phase in ENDED_FROM_OUTSIDE for state in evidence.ranks.values()):
        from distsim.debug.diagnosis.causes.ends import ended_together, verdict_before

        evidence = as_timeouts(evidence)
        if (end := ended_together(evidence)) is not None:
            return verdict_before(evidence, end, diagnose)
    index = EvidenceIndex(evidence)
    divergences = [d for log in index.group_logs for d in find_divergences(index, log)]
    if _nothing_is_wrong(index, divergences):
        return []
    from distsim.debug.diagnosis.explain import explain

    return explain(index, divergences, nothing_moves)


def ended_well(state: RankState) -> bool:
    """Return whether the rank has ended, and its program without an error."""
    return state.over or (state.phase, state.exit_code) in SUCCESSFUL_ENDS


def _nothing_is_wrong(index: EvidenceIndex, divergences: Sequence[Divergence]) -> bool:
    """Return whether all ranks have ended without an error and no calls contradict each other.

    Then no rank or thread can still wait.
    """
    return (
        not divergences
        and not index.evidence.findings
        and not index.pairs.partner  # whose two ends may disagree
        and not index.remote.open
        and all(map(ended_well, index.states.values()))
    )
