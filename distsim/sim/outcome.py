"""What a simulated run leaves behind. Plain data: reports, traces and tests read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.diagnosis.diagnose import Diagnosis
from distsim.debug.diagnosis.silent.finding import Level, SilentFinding
from distsim.debug.records import CallRecord, Evidence, Phase
from distsim.errors import Failure
from distsim.sim.observe.metrics import GpuTrack, Training
from distsim.text.units import format_time

__all__ = ["NOT_PROVEN", "SILENT_FAULT", "CollectiveTotal", "Failure", "LinkUse", "Outcome", "Progress", "RankSummary"]


NOT_PROVEN = 5
"""The exit code of a run that ended well in the ranks that were traced, where these are not all."""
SILENT_FAULT = 5
"""The exit code of a run that ended well and has a silent error, with `--silent strict`: as NOT_PROVEN, the end alone
proves nothing."""


@dataclass(slots=True)
class RankSummary:
    """One rank's time. compute + exposed + idle is its run; communication counts hidden calls too."""

    rank: int
    host: int
    device: str
    end_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    phase: Phase
    exit_code: int | None
    peak_memory_bytes: int | None = None
    """Of its tensors (memory.py); None where nobody asked for it."""


@dataclass(slots=True)
class CollectiveTotal:
    """All calls of one operation on one group with one dtype. Time is from the last arrival to the end."""

    group: str
    op: str
    dtype: str
    num_ranks: int
    count: int
    bytes: int
    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    low_s: float | None = None
    """Where a measured time would lie in eight cases of ten (observe/totals.py); None: nobody measured such."""
    high_s: float | None = None


@dataclass(slots=True)
class LinkUse:
    """What one link carried. Utilisation is of its bandwidth; mean over the whole run."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    bytes: float
    busy_s: float
    mean_utilisation: float
    peak_utilisation: float


@dataclass(slots=True)
class Progress:
    """A glance at a simulation that runs."""

    virtual_time_s: float
    ranks_alive: int
    ranks_total: int
    events: int
    events_per_s: float
    waiting: str
    wall_s: float = 0.0
    tracing: str = ""
    """Which ranks of a program on GPUs are traced, and what of the budget that has taken."""


@dataclass(slots=True, repr=False)
class Outcome:
    """The whole of a run. *exit_code* as in the README: 0 finished, 1 raised, 3 hang, 4 inconsistent."""

    world_size: int
    cluster: str
    backend: str
    seed: int
    program: str
    exit_code: int
    virtual_time_s: float
    wall_time_s: float
    events: int
    results: list[Any] = field(default_factory=list)
    ranks: list[RankSummary] = field(default_factory=list)
    records: dict[int, list[CallRecord]] = field(default_factory=dict)
    """Each rank's last calls (call_log.py), of a scenario or with *trace* all."""
    diagnoses: list[Diagnosis] = field(default_factory=list)
    evidence: Evidence | None = None
    """What the diagnoses were made from, for their report."""
    failures: list[Failure] = field(default_factory=list)
    collectives: list[CollectiveTotal] = field(default_factory=list)
    links: list[LinkUse] = field(default_factory=list)
    link_samples: Sequence[tuple[float, int, float]] = ()
    """Time, place in `links` and utilisation, where a trace was asked for."""
    compute: dict[int, list[tuple[float, float, str]]] = field(default_factory=dict)
    """Each rank's operators on its CPU (begin, end, name), where a trace was asked for."""
    step_ends: dict[int, list[float]] = field(default_factory=dict)
    """When each rank's training steps on its CPU ended, where a trace was asked for."""
    for_trace: bool = True
    """Whether all is there that a trace shows."""
    training: Training | None = None
    """What the GPUs did; None where no rank has used one."""
    gpu_tracks: Mapping[int, list[GpuTrack]] = field(default_factory=dict)
    """By rank, for the trace: what its GPUs ran."""
    silent: list[SilentFinding] = field(default_factory=list)
    """What the program computes otherwise than it says, though all calls matched."""
    notes: list[str] = field(default_factory=list)
    not_traced: Sequence[int] = ()
    """Ranks that did not run, or not to their end, because tracing every rank was beyond the budget."""
    unseen: str = ""
    """Who ran and who did not, and what running all would take; empty where every rank ran to its end."""
    software: str = ""
    """The library of collectives that was assumed, with version, plugin, settings and variant; of GPUs' only."""
    software_matters: bool = False
    """The cluster names more of it than a release: another plugin or setting would give other times."""
    interrupted: bool = False
    cut_short: bool = False
    """By a limit of its scenario."""

    def __repr__(self) -> str:
        """Three lines: what ran, how it ended, what is wrong or what came of it. The rest is in the attributes."""
        ranks = f"{self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"
        ended = {0: "finished", 1: "failed", 3: "hung", 4: "inconsistent collectives"}.get(
            self.exit_code, f"ended with exit code {self.exit_code}"
        )
        if not self.is_proven:
            ended = f"not proven: {self.unseen}"
        first = self.diagnosis
        if first is not None:
            last = f"{first.kind.label}: {first.explanation}"
        elif self.failures:
            last = f"{self.failures[0].type}: {self.failures[0].message}"
        else:
            last = f"results: {self.results!r}"
        last = " ".join(last.split())
        return (
            f"<Outcome of {self.program} on {self.cluster}: {ranks}, seed {self.seed}\n"
            f" {ended} (exit code {self.exit_code}) after {format_time(self.virtual_time_s)} of virtual time\n"
            f" {last if len(last) <= 160 else last[:157] + '...'}>"
        )

    @property
    def proof(self) -> str:
        """What the verdict rests on: "all" ranks were traced to their end, or a "sample" of them."""
        return "sample" if self.not_traced else "all"

    @property
    def is_proven(self) -> bool:
        """Whether it can be said of every rank that it finished, where it is not said that one did not."""
        return not self.not_traced or self.exit_code not in (0, NOT_PROVEN)

    @property
    def has_silent_error(self) -> bool:
        """Whether a silent finding is an error, and not a warning."""
        return any(one.level is Level.ERROR for one in self.silent)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The root cause, or None for a healthy run."""
        return self.diagnoses[0] if self.diagnoses else None
