"""The outcome of a simulated run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.diagnosis.silent.facts import Severity, SilentFinding
from distsim.debug.records import CallRecord, Evidence, Phase
from distsim.debug.records.diagnosis import Diagnosis
from distsim.errors import Failure
from distsim.sim.observe.metrics import GpuTrack, Training
from distsim.text.units import format_time, plural

NOT_PROVEN = 5
"""Exit code of a run in which all traced ranks finished and other ranks were not traced."""
SILENT_FAULT = 5
"""Exit code of a run that finished with a silent error under `--silent strict`."""


@dataclass(slots=True)
class RankSummary:
    """Times of one rank. compute + exposed + idle is its run time; communication includes hidden calls."""

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
    """Peak memory of its CPU tensors; None if it was not measured."""


@dataclass(slots=True)
class CollectiveTotal:
    """All calls of one operation on one group with one dtype.

    A call lasts from the last member's arrival to its end.
    """

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
    """Lower end of the interval that holds 8 of 10 measured times; None without such measurements."""
    high_s: float | None = None
    """Upper end of that interval."""


@dataclass(slots=True)
class LinkUse:
    """Traffic of one link. Utilisation is a fraction of its bandwidth, and the mean covers the whole run."""

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    bytes: float
    busy_s: float
    mean_utilisation: float
    peak_utilisation: float
    alike: int = 1
    """Number of links with its kind, bandwidth and percent of use that it represents."""


@dataclass(slots=True)
class Progress:
    """Progress of a running simulation."""

    virtual_time_s: float
    ranks_alive: int
    ranks_total: int
    events: int
    events_per_s: float
    waiting: str
    wall_s: float = 0.0
    tracing: str = ""
    """Which ranks of a GPU program are traced, and how much of the budget is used."""


@dataclass(slots=True, repr=False)
class Outcome:
    """Everything that a simulated run produced."""

    world_size: int
    """Number of ranks."""
    cluster: str
    """Name of the cluster."""
    backend: str
    """Backend of the default process group."""
    seed: int
    """Random seed of the run."""
    program: str
    """Script, module or function that ran."""
    exit_code: int
    """0 finished, 1 a rank raised, 3 hang, 4 inconsistent collectives, 5 not proven or a silent error."""
    virtual_time_s: float
    """Virtual time at the end of the run."""
    wall_time_s: float
    """Wall time that the simulation took."""
    events: int
    """Number of simulated events."""
    results: list[Any] = field(default_factory=list)
    """Return values of *fn* by rank."""
    ranks: list[RankSummary] = field(default_factory=list)
    """Times of each rank."""
    records: dict[int, list[CallRecord]] = field(default_factory=dict)
    """Last calls of each rank; all calls in a scenario or with *trace*."""
    diagnoses: list[Diagnosis] = field(default_factory=list)
    """Diagnoses, the root cause first; empty for a healthy run."""
    evidence: Evidence | None = None
    """Records and states from which the diagnoses were made."""
    failures: list[Failure] = field(default_factory=list)
    """Exceptions of ranks, one entry for each different traceback."""
    collectives: list[CollectiveTotal] = field(default_factory=list)
    """Totals by group, operation and dtype."""
    links: list[LinkUse] = field(default_factory=list)
    """Traffic of each link that was used; if these are thousands, of one of those that were used alike."""
    link_samples: Sequence[tuple[float, int, float]] = ()
    """(time in seconds, index in `links`, utilisation) samples, if *trace* was set."""
    compute: dict[int, list[tuple[float, float, str]]] = field(default_factory=dict)
    """CPU operators of each rank as (begin, end, name), if *trace* was set."""
    step_ends: dict[int, list[float]] = field(default_factory=dict)
    """Times at which the training steps of each rank ended on its CPU, if *trace* was set."""
    for_trace: bool = True
    """Whether the outcome holds everything that a trace shows."""
    training: Training | None = None
    """Step time, memory and other figures of the GPUs; None if no rank used one."""
    gpu_tracks: Mapping[int, list[GpuTrack]] = field(default_factory=dict)
    """Kernels of each rank's GPUs, for the trace."""
    silent: list[SilentFinding] = field(default_factory=list)
    """Silent findings: all calls matched, but the values on the ranks are inconsistent."""
    notes: list[str] = field(default_factory=list)
    """Remarks that the report prints."""
    not_traced: Sequence[int] = ()
    """Ranks that were not simulated to their end: a sample was asked for, or the budget did not suffice for all."""
    unseen: str = ""
    """Which ranks ran, which did not, and the cost of running all; empty if every rank ran to its end."""
    is_proven: bool = True
    """Whether the verdict holds for the ranks it is asked for: all were traced, or a sample was asked for, or the
    traced ones already failed."""
    software: str = ""
    """The assumed library of GPU collectives, with version, plugin, settings and variant."""
    software_matters: bool = False
    """Whether the cluster specifies a plugin or setting that changes the times."""
    interrupted: bool = False
    """Whether Ctrl-C or SIGTERM ended the run."""
    cut_short: bool = False
    """Whether a limit of the scenario ended the run."""

    def __repr__(self) -> str:
        """Return three lines: the program, its end, and the diagnosis or the results."""
        ranks = plural(self.world_size, "rank")
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
        """`all` if every rank was traced to its end, `sample` if only some were."""
        return "sample" if self.not_traced else "all"

    @property
    def is_sample_finished(self) -> bool:
        """Return whether all ranks that were traced finished, and others were not traced."""
        return bool(self.not_traced) and self.exit_code in (0, NOT_PROVEN)

    @property
    def has_silent_error(self) -> bool:
        """Return whether one of the silent findings is an error, not a warning."""
        return any(one.level is Severity.ERROR for one in self.silent)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Return the root cause, or None for a healthy run."""
        return self.diagnoses[0] if self.diagnoses else None
