"""What a run's training steps were: plain data, a part of the Outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord

__all__ = [
    "Fused",
    "GpuTrack",
    "KernelSlice",
    "MemorySite",
    "OperatorTime",
    "OutOfMemory",
    "PathPart",
    "RankTraining",
    "Saved",
    "Training",
    "UnknownRead",
    "Wait",
]


@dataclass(frozen=True, slots=True)
class KernelSlice:
    """One kernel where it ran."""

    stream: int
    begun_s: float
    ended_s: float
    name: str
    kind: str
    launched_s: float
    """When the host went on, what it launched was under way."""
    host_s: float
    """What the host spent on it before that."""
    records: tuple[CallRecord, ...] = ()
    """The calls that a communication kernel carries out."""


@dataclass(slots=True)
class GpuTrack:
    """What one GPU of a rank ran; only the end if that is much."""

    index: int
    streams: list[str]
    slices: Sequence[KernelSlice]
    steps: list[tuple[float, float]]
    """When each step ended for the host, and on the device."""


@dataclass(slots=True)
class Wait:
    """Communication that nothing hid, a step: of one operation on one group."""

    op: str
    group: str
    moving_s: float
    late_s: float
    """Before the last member (the other end) had come."""
    busy_s: float
    """All that this communication's bytes moved, hidden or not."""
    spared_s: float
    """Of moving_s: what would be hidden if each call took half the time."""


HOST_BOUND = 0.1
"""Of a step, that the GPU waits for the host to launch something: the host sets the pace."""


@dataclass(slots=True)
class MemorySite:
    """GPU memory in use at a rank's peak that one operator took at one line of the program."""

    kind: str
    """What it was for: one of `RankTraining.memory`."""
    where: str
    """file:line of the innermost user code; empty where none was on the stack."""
    code: str
    """That line."""
    operator: str
    tensor: str
    """dtype and shape of the result that took most, as `float32[8192,128256]`."""
    nbytes: int
    count: int
    """Allocations."""


@dataclass(slots=True)
class RankTraining:
    """One rank's mean step, of those that count. compute + exposed + bubble + host is the step."""

    rank: int
    like: tuple[int, ...]
    """Ranks whose figures are taken to be the same, itself included: the others of them did not run."""
    step_s: float
    compute_s: float
    overlapped_s: float
    slowed_s: float
    """Of the overlapped time: what the communication beside it took."""
    exposed_s: float
    late_s: float
    bubble_s: float
    host_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    memory: dict[str, int] = field(default_factory=dict)
    """Allocated bytes by what they were for (device/allocator/allocator.py), when they were most."""
    modules: dict[str, int] = field(default_factory=dict)
    """The same by module, `layers.*.mlp`: that of the parameter, that in whose forward it was allocated."""
    waits: list[Wait] = field(default_factory=list)
    sites: list[MemorySite] = field(default_factory=list)
    """The peak by line and operator; empty unless the run measures memory (RunRequest.measures_memory)."""


@dataclass(slots=True)
class OutOfMemory:
    """A program that ended with torch.OutOfMemoryError on these ranks. Bytes of one GPU."""

    ranks: tuple[int, ...]
    asked: int
    capacity: int
    """Without the context."""
    reserved: int
    allocated: int
    missing: int
    held: dict[str, int]
    """Of the allocated: by what it was for."""
    sharded: bool
    in_backward: bool
    """Or later: all activations are there."""
    asked_as: str = "activations"
    """What was asked for was for: one of `held`."""
    coming_gradients: int = 0
    """Not there yet."""
    coming_optimizer: int | None = None
    """Not made yet, its scratch memory included; None: nobody knows, or no optimizer is there."""
    one_sequence: bool = False
    """The micro-batch is one."""
    sequences: int = 0
    """Of a micro-batch; 0: not known."""
    site: MemorySite | None = None
    """What asked for it; None unless the run measures memory."""


@dataclass(slots=True)
class Fused:
    """Fused kernels of one rank's compiled functions in the whole run (`--fuse`)."""

    rank: int
    functions: dict[str, int]
    """How often each was called."""
    kernels_before: int
    kernels_after: int
    gpu_saved_s: float
    """Of the kernels' own time; against what would have run eagerly."""
    host_saved_s: float
    """Of the host's; below 0 where guards and launchers cost more than what is not launched any more."""


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

    @property
    def every(self) -> float | None:
        """Steps from one checkpoint to the next; None where at most one was written."""
        steps = sorted(self.by_step)
        return (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else None

    @property
    def mean_s(self) -> float:
        """Seconds of one checkpoint."""
        return sum(self.by_step.values()) / max(1, len(self.by_step))


@dataclass(slots=True)
class OperatorTime:
    """One operator's kernels, a step, on the mean rank."""

    name: str
    count: float
    time_s: float


@dataclass(slots=True)
class PathPart:
    """Time that the critical path of a step spent on one thing."""

    kind: str
    """compute, communication or host."""
    name: str
    time_s: float


@dataclass(slots=True)
class UnknownRead:
    """A value that no simulation knows was read."""

    what: str
    where: str
    code: str
    """That line."""
    count: int
    """On one rank: the one that read it most often."""
    expression: str = ""
    """Of that line, what read it: `loss.item()`."""
    condition: str = ""
    """`if`, `while` or `assert`: the program went the way that the placeholder led to."""


@dataclass(slots=True)
class Training:
    """The GPUs' work in steps. Without a step of any optimizer `steps` is 0 and what is of a step is None."""

    gpu: str
    num_gpus: int
    memory_bytes: int
    """Of one GPU."""
    context_bytes: int
    """Of them outside torch's allocator."""
    steps: int = 0
    first_counted: int = 0
    """From this step on, counted from 1, steps are counted."""
    step_times_s: list[float] = field(default_factory=list)
    """Each the slowest rank's, from the second on; of a single step, that one's."""
    step_time_s: float | None = None
    step_low_s: float | None = None
    """Where a measured step would lie in eight cases of ten, by the errors of published steps of its regime
    (step_errors.py) and of what communication is exposed (confidence.py)."""
    step_high_s: float | None = None
    step_regime: str | None = None
    """What the errors of a step go by: one node, many nodes, near launch-bound."""
    launching_s: float | None = None
    """What the host of the mean rank needs to launch the kernels of a step: what its regime goes by."""
    host_work_s: float | None = None
    """What it spends on all classes of that work (kernels/gpu.py): views, functions in Python and collectives, too."""
    tokens_per_step: float | None = None
    tokens_how: str = ""
    """Where the number of tokens is from."""
    model_flops: float | None = None
    """A step's, all GPUs together: the products of forward and backward."""
    hardware_flops: float | None = None
    """All products that ran, recomputed ones as well."""
    recomputes: bool = False
    """Whether the program computes parts of its forward again (checkpoints), and not its attention kernels alone."""
    peak_dtype: str | None = None
    peak_flops_per_s: float | None = None
    ranks: list[RankTraining] = field(default_factory=list)
    operators: list[OperatorTime] = field(default_factory=list)
    critical_path: list[PathPart] = field(default_factory=list)
    """Of the last step, the longest part first (critical_path.py)."""
    critical_path_share: float | None = None
    """How much of that step, up to its end, the path tells of: all, unless it had more kernels than are remembered."""
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    """Ranks that lacked the same are one."""
    placeholder: float = 1.0
    """What the program got for values that nobody knew."""
    reads: list[UnknownRead] = field(default_factory=list)
    saved: Saved = field(default_factory=Saved)
    """Of the rank that spent most time on it."""
    saved_rank: int = 0
    price: float | None = None
    """Of a GPU's hour."""
    power_w: float | None = None
    """Of a GPU at work, or at most."""
    power_is_limit: bool = False
    """Whether `power_w` is what its maker allows, not what the cluster file says."""
    planned_tokens: float | None = None
    """Of the whole training."""
    fused: Fused | None = None
    """Of the rank with most; None: nobody asked for it."""

    @property
    def peak_allocated_bytes(self) -> int:
        return max((rank.peak_allocated_bytes for rank in self.ranks), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        return max((rank.peak_reserved_bytes for rank in self.ranks), default=0)

    @property
    def pacing(self) -> RankTraining | None:
        """The rank for which the others wait: of those whose steps are longest the one that works longest."""
        longest = max((rank.step_s for rank in self.ranks), default=0.0)
        slow = [rank for rank in self.ranks if rank.step_s >= longest * (1 - 1e-3)]
        return max(slow, key=lambda r: (r.compute_s + r.host_s, -r.rank), default=None) if longest else None

    @property
    def host_bound(self) -> bool:
        """Whether the pacing rank's GPU stands idle for a tenth of the step or more because nothing was launched."""
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
