"""Figures of a run's training steps: plain data, a part of the Outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distsim.network.critical_path import PathPart as PathPart

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord


@dataclass(frozen=True, slots=True)
class KernelSlice:
    """Execution of one kernel: its stream, start and end."""

    stream: int
    begun_s: float
    ended_s: float
    name: str
    kind: str
    launched_s: float
    """Time at which the host continued after the launch."""
    host_s: float
    """Seconds that the host spent on the launch before that."""
    records: tuple[CallRecord, ...] = ()
    """The calls that a communication kernel carries out."""


@dataclass(slots=True)
class GpuTrack:
    """Kernels of one GPU of a rank; only the last ones if there are many."""

    index: int
    streams: list[str]
    slices: Sequence[KernelSlice]
    steps: list[tuple[float, float]]
    """End of each step on the host and on the device."""


@dataclass(slots=True)
class Wait:
    """Communication that nothing hid, a step: of one operation on one group."""

    op: str
    group: str
    moving_s: float
    late_s: float
    """Seconds before the last member (or the other end) arrived."""
    busy_s: float
    """Seconds in which this communication transferred bytes, hidden or not."""
    spared_s: float
    """Part of moving_s that would be hidden if each call took half the time."""


HOST_BOUND = 0.1
"""Share of a step that the GPU waits for launches, from which the step counts as host-bound."""


@dataclass(slots=True)
class MemorySite:
    """GPU memory in use at a rank's peak that one operator took at one line of the program."""

    kind: str
    """Kind of the memory: a key of `RankTraining.memory`."""
    where: str
    """file:line of the innermost user code; empty where none was on the stack."""
    code: str
    """Source text of the line."""
    operator: str
    tensor: str
    """dtype and shape of the result that took most, as `float32[8192,128256]`."""
    nbytes: int
    count: int
    """Allocations."""


@dataclass(slots=True)
class RankTraining:
    """One rank's mean step, of those that count. compute + exposed + bubble + host + saving is the step."""

    rank: int
    like: tuple[int, ...]
    """Ranks with these figures, including this one. The other ones did not run."""
    step_s: float
    compute_s: float
    overlapped_s: float
    slowed_s: float
    """Part of the overlapped time by which simultaneous communication slowed computation."""
    exposed_s: float
    late_s: float
    bubble_s: float
    host_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    memory: dict[str, int] = field(default_factory=dict)
    """Allocated bytes by what they were for (device/allocator/allocator.py), when they were most."""
    modules: dict[str, int] = field(default_factory=dict)
    """Memory at the peak by module (`layers.*.mlp`): the parameter's, or the one in whose forward it was allocated."""
    waits: list[Wait] = field(default_factory=list)
    sites: list[MemorySite] = field(default_factory=list)
    """The peak by line and operator; empty unless the run measures memory (RunRequest.measures_memory)."""
    saving_s: float = 0.0
    """Seconds in which the GPU was idle because the step waited for a checkpoint to be written."""


@dataclass(slots=True)
class OutOfMemory:
    """A program that ended with torch.OutOfMemoryError on these ranks. Bytes of one GPU."""

    ranks: tuple[int, ...]
    asked: int
    capacity: int
    """Bytes of the GPU, without the context."""
    reserved: int
    allocated: int
    missing: int
    held: dict[str, int]
    """Allocated bytes by kind."""
    sharded: bool
    in_backward: bool
    """Whether backward had begun, so that all activations were allocated."""
    asked_as: str = "activations"
    """Category of the requested memory: a key of `held`."""
    coming_gradients: int = 0
    """Bytes of gradients that were not allocated yet."""
    coming_optimizer: int | None = None
    """Bytes of optimizer state not allocated yet, including scratch memory; None if unknown or without an optimizer."""
    one_sequence: bool = False
    """Whether the micro-batch is a single sequence."""
    sequences: int = 0
    """Number of sequences in a micro-batch; 0 if unknown."""
    site: MemorySite | None = None
    """Site of the request; None unless the run measures memory."""
    expandable: bool = False
    """Whether the allocator's segments grow (`expandable_segments:True`)."""


@dataclass(slots=True)
class Fused:
    """Fused kernels of one rank's compiled functions in the whole run (`--fuse`)."""

    rank: int
    functions: dict[str, int]
    """Number of calls of each compiled function."""
    kernels_before: int
    kernels_after: int
    gpu_saved_s: float
    """Seconds of kernels that fusing saves, compared with eager execution."""
    host_saved_s: float
    """Seconds of the host that fusing saves; negative if guards and launchers cost more than the saved launches."""


@dataclass(slots=True)
class Saved:
    """Bytes that one rank wrote and read with torch.save and DCP while it used its GPUs."""

    writes: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    by_step: dict[int, float] = field(default_factory=dict)
    """Seconds of writing that the steps waited for, by how many steps had ended."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each checkpoint for which the steps waited, in seconds since the run began."""

    @property
    def every(self) -> float | None:
        """Return steps from one checkpoint to the next; None if at most one was written."""
        steps = sorted(self.by_step)
        return (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else None

    @property
    def mean_s(self) -> float:
        """Return seconds of one checkpoint."""
        return sum(self.by_step.values()) / max(1, len(self.by_step))


@dataclass(slots=True)
class OperatorTime:
    """One operator's kernels, a step, on the mean rank."""

    name: str
    count: float
    time_s: float


@dataclass(slots=True)
class RateRange:
    """How well a rate of the GPU is known: the range of its published measurements."""

    kind: str
    """products, attention, or memory: all that is neither."""
    share: float
    """Share of a step that kernels of this kind compute."""
    shortest: float
    """Shortest time in published measurements, relative to the simulated."""
    longest: float
    sources: int
    """Independent sources; 0: the rate is an estimate, or borrowed from another GPU."""


@dataclass(slots=True)
class UnknownRead:
    """The program read a value that a simulation without values does not know."""

    what: str
    where: str
    code: str
    """Source text of the line."""
    count: int
    """Number of reads on the rank that read the value most often."""
    expression: str = ""
    """Expression of the line that read the value: `loss.item()`."""
    condition: str = ""
    """`if`, `while` or `assert`: the kind of condition whose outcome the placeholder decided."""


@dataclass(slots=True)
class Training:
    """Figures of the GPUs' work in training steps. Without an optimizer step `steps` is 0 and step figures are None."""

    gpu: str
    num_gpus: int
    memory_bytes: int
    """Bytes of one GPU."""
    context_bytes: int
    """Bytes of the CUDA context, outside torch's allocator."""
    steps: int = 0
    first_counted: int = 0
    """First step, counted from 1, whose figures are used."""
    step_times_s: list[float] = field(default_factory=list)
    """Each the slowest rank's, from the second on; of a single step, that one's."""
    step_time_s: float | None = None
    step_low_s: float | None = None
    """Lower end of the interval in which a measured step lies in eight cases of ten.

    It comes from the errors of published steps of its regime (step_errors.py) and of the exposed communication
    (totals.py). None beyond the GPUs of published steps.
    """
    step_high_s: float | None = None
    step_regime: str | None = None
    """Regime whose errors apply to the step: one node, many nodes, or near launch-bound."""
    launching_s: float | None = None
    """Seconds that the host of the mean rank needs to launch the kernels of a step; it decides the regime."""
    host_work_s: float | None = None
    """Seconds of all classes of host work (kernels/gpu.py), including views, Python functions and collectives."""
    tokens_per_step: float | None = None
    tokens_how: str = ""
    """Source of the number of tokens."""
    model_flops: float | None = None
    """A step's, all GPUs together: the products of forward and backward."""
    hardware_flops: float | None = None
    """Flops of all products that ran, including recomputed ones."""
    micro_batch: int = 0
    """Number of sequences in a micro-batch; 0 if unknown."""
    sequence_length: int = 0
    """Tokens of a sequence; 0 if unknown."""
    recomputes: bool = False
    """Whether the program recomputes parts of its forward (checkpointing), besides attention kernels."""
    peak_dtype: str | None = None
    peak_flops_per_s: float | None = None
    rates: list[RateRange] = field(default_factory=list)
    """How well the rates of the GPU's products, attention and memory are known."""
    ranks: list[RankTraining] = field(default_factory=list)
    operators: list[OperatorTime] = field(default_factory=list)
    critical_path: list[PathPart] = field(default_factory=list)
    """Parts of the last step's critical path, the longest first (critical_path.py)."""
    critical_path_share: float | None = None
    """Share of that step that the path covers: 1 unless it had more kernels than are recorded."""
    memory_curve: list[dict[str, int]] = field(default_factory=list)
    """Bytes by kind over the step with the peak, of the rank with the most memory."""
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    """Ranks that lacked the same are one."""
    placeholder: float = 1.0
    """Value that the program got for unknown numbers."""
    reads: list[UnknownRead] = field(default_factory=list)
    routing: str = ""
    """Distribution from which unknown choices of experts were drawn; empty if nothing depended on one."""
    routing_s: float = 0.0
    """Estimated part of the step that goes to the unevenness of that distribution."""
    saved: Saved = field(default_factory=Saved)
    """Checkpoints of the rank that spent most time on them."""
    saved_rank: int = 0
    price: float | None = None
    """Price of one GPU hour."""
    price_basis: str = ""
    """Source and date of a public list price; empty if the user gave the price."""
    power_w: float | None = None
    """Watts of one GPU under load, or its limit."""
    power_is_limit: bool = False
    """Whether `power_w` is the maker's limit instead of a figure from the cluster file."""
    planned_tokens: float | None = None
    """Number of tokens of the whole training."""
    goodput: Any = None
    """Share of new steps in weeks with failures (report/training/goodput.py); None if nobody asked."""
    fused: Fused | None = None
    """Fused kernels of the rank with most of them; None if nothing is fused."""

    @property
    def peak_allocated_bytes(self) -> int:
        return max((rank.peak_allocated_bytes for rank in self.ranks), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        return max((rank.peak_reserved_bytes for rank in self.ranks), default=0)

    @property
    def pacing(self) -> RankTraining | None:
        """Return the rank for which the others wait: among those with the longest steps the one that works longest."""
        longest = max((rank.step_s for rank in self.ranks), default=0.0)
        slow = [rank for rank in self.ranks if rank.step_s >= longest * (1 - 1e-3)]
        return (
            max(slow, key=lambda r: (r.compute_s + r.host_s + r.saving_s, -r.rank), default=None) if longest else None
        )

    @property
    def host_bound(self) -> bool:
        """Return whether the pacing rank's GPU is idle for a tenth of the step or more because nothing was launched."""
        rank = self.pacing
        return rank is not None and rank.host_s >= HOST_BOUND * rank.step_s

    @property
    def tokens_per_s(self) -> float | None:
        if self.tokens_per_step is None or not self.step_time_s:
            return None
        return self.tokens_per_step / self.step_time_s

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s / self.num_gpus

    @property
    def mfu(self) -> float | None:
        return self._share(self.model_flops)

    @property
    def hfu(self) -> float | None:
        return self._share(self.hardware_flops)

    def _share(self, flops: float | None) -> float | None:
        if flops is None or not self.step_time_s or not self.peak_flops_per_s:
            return None
        return flops / self.step_time_s / self.num_gpus / self.peak_flops_per_s
