"""Diagnoses evidence, root cause first. Pure: no I/O, no clock, no torch.

`explain` is imported only if a run has a fault, because most runs end without one.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.divergence.find import Divergence, find_divergences
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import Evidence, Phase
from distsim.debug.records.diagnosis import Call, Diagnosis, Stuck
from distsim.debug.records.kinds import Kind

__all__ = ["Call", "Diagnosis", "Kind", "Stuck", "diagnose"]

SUCCESSFUL_ENDS = {(Phase.FINISHED, None), (Phase.FINISHED, 0), (Phase.EXITED, 0)}
"""Phases and exit codes of ranks that have ended without an error."""


def diagnose(evidence: Evidence, *, nothing_moves: bool = False) -> list[Diagnosis]:
    """Return the diagnoses, the root cause first; empty if nothing is wrong.

    If *nothing_moves* any more (at the end of a simulation), blocked ranks are reported even without a known reason.
    """
    index = EvidenceIndex(evidence)
    divergences = [d for log in index.group_logs for d in find_divergences(index, log)]
    if _ended_well(index, divergences):
        return []
    from distsim.debug.diagnosis.explain import explain

    return explain(index, divergences, nothing_moves)


def _ended_well(index: EvidenceIndex, divergences: Sequence[Divergence]) -> bool:
    """Return whether all ranks have ended without an error and no calls contradict each other.

    Then no rank or thread can still wait.
    """
    return (
        not divergences
        and not index.evidence.findings
        and not index.pairs.partner  # whose two ends may disagree
        and not index.remote.open
        and all((state.phase, state.exit_code) in SUCCESSFUL_ENDS for state in index.states.values())
    )
