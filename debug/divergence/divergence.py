"""The first number at which the members of a group are not in the same call."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.debug.divergence.source_order import Relation
from distsim.debug.matching.agreement import Mismatch
from distsim.debug.matching.index import GroupLog
from distsim.debug.records import CallRecord, State
from distsim.debug.records.kinds import Kind

__all__ = ["SHIFTS", "Divergence"]

SHIFTS = frozenset({Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, Kind.UNEVEN_ITERATIONS})
"""Every later call of the group is paired with a wrong one."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first number at which the members of a group are not in the same call."""

    kind: Kind
    group_log: GroupLog
    seq: int
    culprits: tuple[int, ...]
    reference: tuple[int, ...]
    expected: CallRecord
    """The reference's call."""
    got: CallRecord
    """The first culprit's call."""
    tie: bool
    mismatch: Mismatch | None = None
    relation: Relation | None = None
    borne_out: bool = False
    """Only the calls' lines show it, but later calls of the group do contradict each other."""
    refused: CallRecord | None = None
    """The first culprit's call that torch refused, and that is missing."""

    @property
    def met(self) -> bool:
        """Calls met that contradict each other; else they are alike, and go together from whatever lines they come."""
        return self.mismatch is not None or self.borne_out

    @property
    def blocks(self) -> bool:
        """Later calls of the group can not be trusted, or somebody is still in this one."""
        met = self.group_log.meetings[self.seq].values()
        return self.kind in SHIFTS or any(r.state is not State.COMPLETED for r in met)
