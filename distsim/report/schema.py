"""Types of the JSON report of a run, a guarded job or a diagnosis, and of a job's events."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from distsim.debug.diagnosis.silent.facts import Severity, SilentKind
from distsim.debug.records import Group
from distsim.debug.records.diagnosis import Call, Stuck
from distsim.debug.records.kinds import Kind
from distsim.report.failures import MergedFailure
from distsim.report.training.goodput import Goodput
from distsim.report.training.section import Gain
from distsim.sim.observe.metrics import Fused, MemorySite, OperatorTime, PathPart, RateRange, UnknownRead, Wait

Figure = float | None
"""A number; null if it is unknown or not finite."""


class PlaceEntry(TypedDict):
    """A line of the program."""

    file: str
    line: int
    function: str
    source: NotRequired[str]
    """Text of the line, where its file could be read."""
    through: NotRequired[PlaceEntry]
    """Line of the program from which a library made the call."""


class StackEntry(TypedDict):
    """Ranks with one stack."""

    ranks: list[int]
    frames: list[PlaceEntry]
    """Frames of the program, outermost first."""


class TracebackEntry(TypedDict):
    """Ranks with one traceback."""

    ranks: list[int]
    text: str


class HistoryEntry(TypedDict):
    """Ranks whose last calls are alike."""

    ranks: list[int]
    calls: list[str]
    """Last calls of a rank, oldest first: operation, number, group, line, state."""


class ProcessEntry(TypedDict):
    """A process of the job."""

    pid: int
    host: str


class DiagnosisEntry(TypedDict):
    """A fault: its kind, the ranks at fault, the blocked ranks, and what to do next."""

    kind: Kind
    """Kind of the diagnosis (docs/kinds.md)."""
    culprits: list[int]
    """Global ranks at fault: the minority, the missing rank, the rank that raised, or all ranks of a cycle."""
    victims: list[int]
    """Global ranks that are blocked because of the fault."""
    group: Group | None
    """Process group of the call."""
    call: Call | None
    """The call at fault; if ranks are missing, the call in which the others wait."""
    sites: dict[str, PlaceEntry]
    """Current source line of each rank."""
    stuck: dict[str, Stuck]
    """Locations of the blocked ranks; keys without a value are left out."""
    cycle: list[int] | None
    """Ranks in a cycle: each waits for the next, and the last for the first."""
    pair: list[int] | None
    """Sender and receiver of a message."""
    detected_after_s: Figure
    """Seconds from the fault to the diagnosis."""
    explanation: str
    """What happened, in sentences."""
    suggestion: str
    """What to do next."""
    see: str
    """Section of the documentation about the kind."""
    provisional: NotRequired[bool]
    """True: the job may still go on by itself; the diagnosis is withdrawn if it does."""
    warning: NotRequired[bool]
    """True: it is a warning, whatever its kind."""
    causes: NotRequired[list[PlaceEntry]]
    """Further lines of the program that caused it."""
    pace: NotRequired[dict[str, float]]
    """Measurements of a slow rank: `excess_s` a step, `share` of a step, `certainty` in standard errors."""
    came_after_s: NotRequired[float]
    """Seconds for which the others had waited when a straggler came: the warning is of the past."""
    stacks: NotRequired[list[StackEntry]]
    """Stacks of culprits and victims, equal ones once, the fewest ranks first."""
    tracebacks: NotRequired[list[TracebackEntry]]
    """Tracebacks of culprits that raised, equal ones once."""
    last_calls: NotRequired[dict[str, str]]
    """Last call of each culprit that is not stuck in one: operation, number, group, line, state."""
    history: NotRequired[list[HistoryEntry]]
    """Last calls of culprits and victims, equal ones once, the fewest ranks first."""
    processes: NotRequired[dict[str, ProcessEntry]]
    """Processes of the culprits, by rank."""


class SilentEntry(TypedDict):
    """A silent wrong result: one fault with one cause, and all tensors that show it."""

    kind: SilentKind
    """Kind of the fault (docs/silent.md)."""
    level: Severity
    ranks: list[int]
    tensors: list[str]
    step: int
    site: PlaceEntry | None
    evidence: str
    distance: Figure
    """Largest relative distance of values that had to be equal; null if the fault is not one of values."""
    explanation: str
    suggestion: str
    see: str


class RankEntry(TypedDict):
    """One rank of a simulated run, in virtual seconds."""

    rank: int
    host: int
    device: str
    phase: str
    exit_code: int | None
    end_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    """Part of `communication_s` during which the rank did nothing else."""
    idle_s: float
    peak_memory_bytes: NotRequired[int]
    """Peak of its tensors on the CPU, where it was asked for."""


class CollectiveEntry(TypedDict):
    """All calls of one operation on one group with one dtype."""

    group: str
    op: str
    dtype: str
    num_ranks: int
    count: int
    bytes: int
    time_s: float
    algbw_bytes_per_s: Figure
    busbw_bytes_per_s: Figure
    low_s: Figure
    high_s: Figure
    """A measured `time_s` would lie between these in eight cases of ten; null where nobody has measured such calls."""


class LinkEntry(TypedDict):
    """A link that was used."""

    name: str
    kind: str
    bandwidth_bytes_per_s: Figure
    """Null: infinite."""
    bytes: float
    busy_s: float
    mean_utilisation: float
    peak_utilisation: float
    alike: int
    """Links that are used alike, this one included."""


class RankStepEntry(TypedDict):
    """The mean counted step of one rank on a GPU."""

    rank: int
    alike: int
    """Ranks with these figures, this one included; the others did not run."""
    step_s: float
    compute_s: float
    overlapped_s: float
    """Part of `compute_s` beside communication."""
    slowed_s: float
    """Part of `overlapped_s` by which communication slowed computation."""
    exposed_s: float
    """Communication that nothing hid."""
    late_s: float
    """Part of `exposed_s` before the last member came."""
    bubble_s: float
    """Waits for a message whose other end had not come."""
    host_s: float
    """The host had launched nothing."""
    saving_s: float
    """A checkpoint was being written."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    memory: dict[str, int]
    """Allocated bytes by what they were for, when they were most."""
    modules: dict[str, int]
    """The same by module, as the second step had it; empty where the peak was in the first."""
    waits: list[Wait]
    sites: NotRequired[list[MemorySite]]
    """The same by line and operator, of `distsim fits` alone."""


class ShortageEntry(TypedDict):
    """Ranks that raised torch.OutOfMemoryError; bytes of one GPU."""

    ranks: list[int]
    asked: int
    asked_as: str
    """Kind of the requested memory: a key of `held`."""
    capacity: int
    reserved: int
    allocated: int
    missing: int
    held: dict[str, int]
    """Allocated bytes by what they were for."""
    sharded: bool
    """Parameters are shards."""
    in_backward: bool
    one_sequence: bool
    sequences: int
    """Sequences of a micro-batch; 0 if unknown."""
    coming_gradients: int
    """Bytes that were not allocated yet."""
    coming_optimizer: int | None
    expandable: bool
    """The allocator's segments grow (`expandable_segments:True`)."""
    remedies: list[str]
    """What would have fitted, a sentence each."""
    site: NotRequired[MemorySite]
    """What asked, of `distsim fits` alone."""


class CheckpointEntry(TypedDict):
    """Files that the rank which spent most time on them wrote with torch.save and DCP, and read."""

    rank: int
    writes: int
    written_bytes: int
    write_s: float
    reads: int
    read_bytes: int
    read_s: float
    every_steps: Figure
    mean_write_s: Figure
    share: Figure
    """Share of the time that checkpoints take; null: fewer than two."""


class CostEntry(TypedDict):
    """CostEntry of training on a number of tokens."""

    tokens: float
    seconds: float
    gpu_hours: float
    price: Figure
    """Price of one GPU hour."""
    price_basis: str
    """Source and date of a public list price; empty for a price of the user's."""
    amount: Figure
    energy_kwh: Figure
    energy_is_limit: bool
    """The power is the most that the GPU's maker allows."""
    power_w: Figure


class TrainingEntry(TypedDict):
    """The steps of simulated GPUs. What cannot be said is null."""

    gpu: str
    num_gpus: int
    gpu_memory_bytes: int
    context_bytes: int
    """Memory of a GPU outside torch's allocator."""
    steps: int
    """Ends of an optimizer's `step`, of the rank with fewest."""
    first_counted: int
    """The figures are means of the steps from this one (counted from 1) on."""
    step_times_s: list[float]
    """Each the slowest rank's, from step 2 on."""
    step_time_s: Figure
    """Median of the counted ones."""
    step_low_s: Figure
    step_high_s: Figure
    """A measured step lies between these in eight cases of ten, by the errors of published steps."""
    step_regime: str | None
    """Whose errors these are: one node, many nodes, near launch-bound."""
    launching_s: Figure
    """Time in which the host of the mean rank launches the kernels of a step."""
    host_work_s: Figure
    """The same with views, autograd functions in Python and collectives."""
    host_bound: bool
    tokens_per_step: Figure
    tokens_how: str
    """Where the number of tokens is from."""
    tokens_per_s: Figure
    tokens_per_s_per_gpu: Figure
    model_flops: Figure
    """Products of forward and backward of a step, all GPUs together."""
    hardware_flops: Figure
    """The same with what backward computes again."""
    mfu: Figure
    hfu: Figure
    peak_dtype: str | None
    peak_flops_per_s: Figure
    rates: list[RateRange]
    """How well the rates of the GPU's products, attention and memory are known."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_memory_bytes: int
    """The same as `peak_reserved_bytes`, which is what is usually published."""
    pacing_rank: int | None
    """Rank for which the others wait."""
    ranks: list[RankStepEntry]
    memory_curve: list[dict[str, int]]
    """Bytes by kind of memory over the step with the peak, of the rank with most."""
    operators: list[OperatorTime]
    critical_path: list[PathPart]
    """Parts of the last step, the longest first."""
    critical_path_share: Figure
    """Share of the step, up to its end, that the path covers."""
    gains: list[Gain]
    out_of_memory: list[ShortageEntry]
    unknown_reads: list[UnknownRead]
    """Reads of values that a simulation without values does not know."""
    placeholder: float
    """Value that they got; what `--routing` or `--lengths` drew has its own name in `what`."""
    routing: str
    """Distribution from which unknown choices of experts were drawn; empty if nothing depended on one."""
    routing_s: float
    """Estimated part of the step that its unevenness costs."""
    checkpoints: CheckpointEntry
    cost: CostEntry | None
    goodput: Goodput | None
    """With --mtbf or --failures."""
    fused: Fused | None


class JobEntry(TypedDict):
    """One of several jobs whose records are in one folder."""

    job: str
    world_size: int
    began_unix_s: float
    diagnoses: list[DiagnosisEntry]
    exit_code: int
    inconclusive: NotRequired[str]


class RunReport(TypedDict):
    """The report of a run, a guarded job, `diagnose` or `attach`.

    The same content as the terminal's. Two simulations with the same seed give the same bytes: nothing is measured on
    the machine that simulates. Bandwidths have nccl-tests' meaning; a figure that is not finite is null. Keys that only
    one of the commands has are not required.
    """

    schema: Literal["distsim.report/1"]
    exit_code: int
    """0 finished, 1 raised, 2 inconclusive records, 3 hang, 4 inconsistent collectives, 5 the ranks that were traced
    finished and these are not all, or with `--silent strict` all finished and `silent` has an error."""
    diagnoses: list[DiagnosisEntry]
    """The root cause first; empty for a healthy run."""
    silent: NotRequired[list[SilentEntry]]
    """Silent wrong results; empty also where nobody looked (`--silent off`, more than 64 ranks, no values)."""
    inconclusive: NotRequired[str]
    """Why nothing could be said."""
    interrupted: NotRequired[bool | list[str]]
    """Whether Ctrl-C ended it; of a guarded job: where its ranks were then."""
    world_size: NotRequired[int]
    version: NotRequired[str]
    """Version of distsim."""
    program: NotRequired[str]
    cluster: NotRequired[str]
    backend: NotRequired[str]
    seed: NotRequired[int]
    software: NotRequired[str | None]
    """Whose collectives were assumed (NCCL's version, plugin, settings, the cluster's variant); null where none but
    gloo's or MPI's were used."""
    proof: NotRequired[Literal["all", "sample"]]
    """Whether the verdict rests on all ranks or a sample of them."""
    not_traced: NotRequired[list[int] | list[list[int]]]
    """Ranks of which nothing is known, because they did not run, or not to their end; from 4,096 ranks on as ranges
    [first, last]."""
    unseen: NotRequired[str]
    """The line that says so, with what running all would take."""
    virtual_time_s: NotRequired[float]
    """Time that the program took on the cluster."""
    events: NotRequired[int]
    """Simulated events."""
    ranks: NotRequired[list[RankEntry]]
    collectives: NotRequired[list[CollectiveEntry]]
    links: NotRequired[list[LinkEntry]]
    """Used links; of more than 2,000 one of those that are used alike."""
    failures: NotRequired[list[MergedFailure]]
    """Exceptions of the program, equal ones merged."""
    notes: NotRequired[list[str]]
    training: NotRequired[TrainingEntry]
    """Steps, where ranks used GPUs."""
    jobs: NotRequired[list[JobEntry]]
    """Each job, where a folder has records of several."""
    rings: NotRequired[str]
    """Folder of the flight records."""
    host: NotRequired[str]
    job: NotRequired[str]
    killed_after_end: NotRequired[list[int]]
    """Ranks whose program was through and that were killed."""


class EventLine(TypedDict):
    """One line of a file of events (docs/events.md)."""

    schema: Literal["distsim.events/1"]
    event: Literal["warning", "pace", "straggler", "withdrawn", "verdict", "finished"]
    unix_s: float
    host: str
    world_size: NotRequired[int]
    job: NotRequired[str]
    rings: NotRequired[str]
    program: NotRequired[str]
    cluster: NotRequired[str]
    diagnosis: NotRequired[DiagnosisEntry]
    exit_code: NotRequired[int]
    kind: NotRequired[str]
    """Kind of a fact about the job's pace."""
    text: NotRequired[str]
    """The printed line."""
    pace: NotRequired[dict[str, Any]]
    """Its figures."""
    elapsed_s: NotRequired[float]
    virtual_time_s: NotRequired[float]
    inconclusive: NotRequired[str]
