"""What a picture is made from: a simulated run, or the flight records of a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distsim.debug.records import CallRecord, Evidence
from distsim.debug.records.diagnosis import Diagnosis

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import GpuTrack
    from distsim.sim.outcome import Outcome

__all__ = ["Fault", "Material", "of_outcome", "of_records"]

Fault = tuple[float, float | None, str]
"""From a time (seconds) to another, or to the end; what was planted."""


@dataclass(slots=True)
class Material:
    """Times are seconds since the run began."""

    records: Mapping[int, Sequence[CallRecord]]
    """By rank, in program order."""
    end_s: float
    diagnoses: Sequence[Diagnosis] = ()
    evidence: Evidence | None = None
    compute: Mapping[int, Sequence[tuple[float, float, str]]] = field(default_factory=dict)
    gpus: Mapping[int, Sequence[GpuTrack]] = field(default_factory=dict)
    alike: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Of equal ranks of which one was traced: that one -> all of them."""
    link_names: Sequence[str] = ()
    link_samples: Sequence[tuple[float, int, float]] = ()
    faults: Sequence[Fault] = ()
    snapshot: bool = False
    """Of a job that runs: who waits now is worth seeing, though nobody may be to blame."""


def of_outcome(outcome: Outcome, faults: Sequence[Fault] = ()) -> Material:
    """Of a simulated run."""
    alike = {} if outcome.training is None else {rank.rank: rank.like for rank in outcome.training.ranks}
    return Material(
        records=outcome.records,
        end_s=outcome.virtual_time_s,
        diagnoses=outcome.diagnoses,
        evidence=outcome.evidence,
        compute=outcome.compute,
        gpus=outcome.gpu_tracks,
        alike={rank: like for rank, like in alike.items() if len(like) > 1},
        link_names=[link.name for link in outcome.links],
        link_samples=outcome.link_samples,
        faults=faults,
    )


def of_records(diagnoses: Sequence[Diagnosis], evidence: Evidence, snapshot: bool = False) -> Material:
    """Of a real run, alive or dead."""
    calls = (record for records in evidence.records.values() for record in records)
    last_s = max((max(c.issued_s, c.completed_s or 0.0) for c in calls), default=0.0)
    return Material(evidence.records, max(evidence.now_s, last_s), diagnoses, evidence, snapshot=snapshot)
