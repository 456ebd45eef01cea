"""One simulated GPU of one process: its streams, its memory, and the work of the process on it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import UntypedStorage

from distsim.cluster.graph.cluster import connections
from distsim.debug.records import CallRecord, CallWait, HostWait, State, Wait
from distsim.errors import NotSimulated
from distsim.kernels import Cost
from distsim.kernels.gpu import HostCpu, host_of
from distsim.sim.device.allocator import Allocator, Block, ExpandableAllocator, Full, is_expandable
from distsim.sim.device.allocator.claims import Shortage, shortage, site_reader
from distsim.sim.device.generator import CudaGenerator
from distsim.sim.device.operators.values import Values
from distsim.sim.device.timeline import Comm, Kernel, Mark, StreamTimeline, Timeline
from distsim.sim.device.timeline import StreamWait as StreamWait
from distsim.sim.device.timeline.fusion import Fusion
from distsim.sim.device.timeline.steps import InFlight, Steps
from distsim.sim.isolation.clock import EPOCH_S
from distsim.sim.isolation.process import require_task
from distsim.sim.kernel.scheduler import Event
from distsim.sim.observe.metrics import Saved

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.kernels import Gpu
    from distsim.sim.isolation.process import RankTask, SimProcess

_nbytes = UntypedStorage.nbytes

CUDA_VERSION = "12.8"
"""Version in torch.version.cuda and of the CUDA runtime."""
SAMPLE_S = 1 / 6
"""Seconds over which NVML computes its utilization: "between 1 second and 1/6 second, depending on the product"."""
KERNELS = "the kernels of its GPU"
"""Text for the wait of a host if none of its kernels is a call with other ranks. Such a wait always ends."""


class Held:
    """Device memory of one storage, given back when the storage dies."""

    __slots__ = ("__weakref__", "_block", "device", "due", "nbytes", "origins", "streams")

    def __init__(self, device: Device, block: Block | None, nbytes: int) -> None:
        self.device = device
        self._block = block
        self.nbytes = nbytes
        self.due: tuple[StreamTimeline, str, str] | None = None
        """Stream, kind and module for memory that is allocated later; None if nothing is due.

        A tensor of a kernel that is being fused (timeline/fusion.py) is allocated when it is read after that kernel.
        """
        self.origins: Sequence[Held] = ()
        """Memory that must stay for as long as this may be recomputed from it."""
        self.streams: list[StreamTimeline] | None = None
        """Other streams that use the memory (Tensor.record_stream): it is not free before they reach its end."""

    @property
    def lives(self) -> bool:
        """Return whether the storage still exists."""
        return self._block is not None or self.due is not None

    @property
    def block(self) -> Block | None:
        """Return the memory block; None after it was freed. Reading this allocates memory that is due."""
        if self.due is not None:
            self.device.write_due(self)
        return self._block

    def take(self) -> None:
        """Allocate the memory that is due."""
        if self.due is None:
            return
        (stream, kind, module), self.due, self.origins = self.due, None, ()
        ledger = self.device.memory.ledger
        before, ledger.kind, ledger.module = (ledger.kind, ledger.module), kind, module
        try:
            self._block = self.device.allocate(self.nbytes, stream)
        finally:
            ledger.kind, ledger.module = before

    def postpone(self, due: tuple[StreamTimeline, str, str]) -> None:
        """Free the memory, and allocate it again as *due* says once it is read."""
        block, self._block, self.due = self._block, None, due
        if block is not None:
            self.device.free(block, self.streams)

    def release(self) -> None:
        block, self._block, self.due, self.origins = self._block, None, None, ()
        if block is not None:
            self.device.free(block, self.streams)

    __del__ = release


class Device:
    """GPU *index* of *process*."""

    def __init__(self, process: SimProcess, index: int, model: Gpu) -> None:
        self.process = process
        self.index = index
        self.model = model
        self.torch_device = torch.device("cuda", index)
        one_connection = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self.timeline = Timeline(process.port.env, one_connection, model.spec.gemm.persistent)
        kind = ExpandableAllocator if is_expandable(os.environ) else Allocator
        self.memory = kind(model.memory_bytes - model.context_bytes)
        self.shortage: Shortage | None = None
        """Shortage of the last OutOfMemoryError."""
        self._accelerators: Accelerators = process.accelerators
        self._accelerators.steps.ledgers.append(self.memory.ledger)
        if process.port.facts.keeps_sites:
            self.memory.ledger.site_of = site_reader(self.memory.ledger, self._accelerators)
        self.is_late = False
        """Whether new tensors are allocated later, as parts of a fused kernel."""
        self.streams: list[StreamTimeline] = []
        self.pools: dict[int, list[StreamTimeline]] = {}
        """Streams that torch.cuda.Stream() gives out in turn, by priority."""
        self.pool_turns: dict[int, int] = {}
        self.default_stream = self.new_stream("default")
        self.comms: list[Comm] = []
        """Communication kernels that have not ended, in the order in which the host put them."""
        self.in_flight = InFlight()
        self.watchdog: Any = None
        """Watchdog that ends the process if a collective takes too long (c10d/gpu_work.py)."""
        self._deferred: list[tuple[Block, list[Mark]]] = []
        self._waiting: list[RankTask] = []

    @property
    def host(self) -> HostCpu:
        """Return the CPU costs of launching work on the device."""
        return self._accelerators.host

    def new_stream(self, name: str) -> StreamTimeline:
        stream = self.timeline.stream(name)
        stream.number = len(self.streams)
        self.streams.append(stream)
        return stream

    # -- work

    def launch(self, stream: StreamTimeline, cost: Cost, task: RankTask, name: Any) -> None:
        """Put a kernel at the end of *stream*; the host continues."""
        if self._accelerators.capture is not None:
            self.put_held_back()
            self._accelerators.capture.kernels.append((self, cost, name))
            return
        seconds = cost.seconds if cost.memory_bound else cost.seconds * self._accelerators.slowest
        seconds += self.model.gap_s
        launched_s = task.now_s() + self.model.launch_s
        faults = self.process.port.faults
        if faults.are_planted:
            seconds = faults.kernel_s(self.process, launched_s, seconds)
        kernel = Kernel(seconds, launched_s, cost.memory_bound, name, kind=cost.kind)
        self.timeline.put(stream, kernel)
        if self.process.observers.recorder is not None:
            self.process.observers.recorder.launched(self, stream, kernel)

    def plain_cost(self, nbytes: int) -> Cost:
        """Return the cost of a kernel that only reads and writes *nbytes*."""
        memory, model = self.model.spec.memory, self.model
        seconds = max(memory.floor, nbytes / (model.memory_bandwidth * memory.elementwise))
        return Cost(seconds, 1, 0, nbytes, "elementwise", True)

    def communicate(self, stream: StreamTimeline, comm: Comm) -> Mark:
        """Put a communication kernel at the end of *stream*, and return the mark behind it."""
        if self._accelerators.capture is not None:
            raise NotSimulated("a collective in a CUDA graph", "leave it out of the capture")
        self.comms.append(comm)
        self.timeline.put(stream, comm)
        if self.process.observers.recorder is not None:
            self.process.observers.recorder.launched(self, stream, comm)
        comm.behind = self.timeline.mark(stream, comm.launched_s)
        return comm.behind

    def finish(self, task: RankTask) -> None:
        """Finish pending communication when the process ends.

        CUDA would abort it, and a call that can never end would not be reported.
        """
        for comm in list(self.comms):
            if comm.behind is not None and not any(record.state is State.FAILED for record in comm.records):
                self.synchronize(task, comm.behind)

    def ended(self, comm: Comm) -> None:
        """End the kernel *comm*: the network has moved its last byte."""
        self.comms.remove(comm)
        self.call_ended()
        self.timeline.end(comm)

    def call_ended(self) -> None:
        """Update the reported waits after a call ended: waiters now wait for the next open call."""
        for task in self._waiting:
            if task.request is not None:
                task.request.why = self.why()

    def why(self) -> Wait:
        """Return the wait of the host, for reports."""
        for comm in self.comms:
            if comm.record is not None:
                return CallWait(open_call(comm))
        return HostWait(KERNELS)

    def synchronize(self, task: RankTask, mark: Mark, limit_s: float | None = None, explicit: bool = True) -> bool:
        """Return whether the host waits until *mark* is reached, or for *limit_s*; whether it has been (see
        Task.wait_until).
        """
        if self._accelerators.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        task.flush()
        self.in_flight.host_waits()
        if self.timeline.reached(mark):
            return True
        event: Event = self.process.port.event()
        self.timeline.when_reached(mark, lambda: None if event.triggered else _succeed(event))
        self._waiting.append(task)
        try:
            return task.wait_until(event, self.why(), limit_s, explicit)
        finally:
            self._waiting.remove(task)

    def copied_to(self, task: RankTask, mark: Mark) -> None:
        """Make the host wait for *mark*, the end of a copy to an idle GPU.

        If no other rank can influence that time, the rank continues at once on its own clock. Models are then moved
        to their GPUs by one rank after another, and the weights of all ranks are not in host memory at the same
        time.
        """
        foreseen_s = None
        if not any(not other.finished for other in self.process.tasks if other is not task):
            foreseen_s = self.timeline.foresee(mark)
        if foreseen_s is None:
            self.synchronize(task, mark)
            return
        self.in_flight.host_waits()
        waited_s = max(0.0, foreseen_s - task.now_s())
        task.compute(waited_s)
        self.process.times.idle_s += waited_s

    def marks(self, now_s: float) -> list[Mark]:
        """Return marks at the current ends of all streams."""
        self.put_held_back()
        return [self.timeline.mark(stream, now_s) for stream in self.streams if stream.items]

    def synchronize_all(self, task: RankTask) -> None:
        for mark in self.marks(task.now_s()):
            self.synchronize(task, mark)

    def wait_for(self, stream: StreamTimeline, mark: Mark, now_s: float) -> None:
        """Let later work in *stream* begin after *mark*."""
        if self.in_flight.open:
            self.in_flight.stream_waits(stream)
        if mark.reached_s is None:
            self.timeline.put(stream, StreamWait(mark, now_s))
            for device in self._accelerators.devices:
                if device is not self and device.timeline.holds(mark):  # it tells this one when it gets there
                    device.timeline.when_reached(mark, self.timeline.catch_up)

    # -- memory

    def hold(self, storage: UntypedStorage, stream: StreamTimeline) -> None:
        """Allocate what *storage* takes, until it dies."""
        nbytes = _nbytes(storage)
        if not nbytes:
            return
        if not self.is_late:
            storage._distsim_held = Held(self, self.allocate(nbytes, stream), nbytes)
            return
        held = storage._distsim_held = Held(self, None, nbytes)
        held.due = stream, self.memory.ledger.kind, self.memory.ledger.module

    def put_held_back(self) -> None:
        """Launch what waits to become a part of fused kernels, which takes its memory."""
        if self.timeline.before_put is not None:
            self.timeline.before_put()

    def write_due(self, held: Held) -> None:
        """Take the memory of *held*, a result of compiled code that something outside of it reads."""
        fusion = self._accelerators.fusion
        if fusion is None:
            held.take()
        else:
            fusion.write(held)

    def allocate(self, nbytes: int, stream: StreamTimeline) -> Block:
        if not self._accelerators.works:
            self._accelerators.begin_work()
        if self._deferred:
            self.give_back()
        try:
            return self.memory.allocate(nbytes, stream.number)
        except Full:
            if self._deferred:  # CUDACachingAllocator.cpp, synchronize_and_free_events
                for mark in [mark for _, marks in self._deferred for mark in marks]:
                    self.synchronize(require_task(), mark)
                return self.allocate(nbytes, stream)
            if not self.process.port.facts.measures_memory:
                self.shortage = shortage(self.memory, nbytes)
                raise out_of_memory(self, nbytes) from None
            # The first shortage is the verdict; the run goes on to learn what would have been enough.
            if self.shortage is None:
                ledger = self.memory.ledger
                shape, site = ledger.shape, None if ledger.site_of is None else ledger.site_of()
                ledger.shape = shape
                self.shortage = replace(shortage(self.memory, nbytes), site=site)
            self.memory.is_unlimited = True
            return self.memory.allocate(nbytes, stream.number)

    def free(self, block: Block, streams: list[StreamTimeline] | None) -> None:
        marks = []
        for stream in streams or ():
            if stream.items:
                marks.append(self.timeline.mark(stream, stream.last_put_s))
        self.memory.let_go(block)
        if marks:
            self._deferred.append((block, marks))
        else:
            self.memory.reclaim(block)

    def give_back(self) -> None:
        """Release memory that streams used after it was freed and no longer use."""
        left = []
        for block, marks in self._deferred:
            if all(self.timeline.reached(mark) for mark in marks):
                self.memory.reclaim(block)
            else:
                left.append((block, marks))
        self._deferred = left

    def utilization(self, now_s: float) -> int:
        """Return the percentage of the last sampling period in which a kernel ran, including kernels that wait for
        other ranks.
        """
        self.timeline.catch_up()
        begin_s = max(0.0, now_s - SAMPLE_S)
        spans = [(item.begun_s, item.ended_s) for _, item in self.timeline.done]
        spans += [(s.items[0].begun_s, None) for s in self.streams if s.items and isinstance(s.items[0], Kernel)]
        busy_s, until_s = 0.0, begin_s
        for from_s, to_s in sorted((a, now_s if b is None else b) for a, b in spans if a is not None):
            if to_s > until_s:
                busy_s += min(to_s, now_s) - max(from_s, until_s)
                until_s = to_s
        return round(100 * busy_s / (now_s - begin_s)) if now_s > begin_s else 0


def _succeed(event: Event) -> None:
    event.succeed()


def out_of_memory(device: Device, nbytes: int) -> torch.OutOfMemoryError:
    """Return torch's out-of-memory error (c10/cuda/CUDACachingAllocator.cpp, `malloc`)."""
    memory, model = device.memory, device.model
    total, used = model.memory_bytes, memory.reserved + model.context_bytes
    allowed = "" if memory.allowed >= memory.capacity else f", and {_size(memory.allowed)} allowed to this process"
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU {device.index} has a total capacity of "
        f"{_size(total)} of which {_size(max(0, total - used))} is free{allowed}. Of the allocated memory "
        f"{_size(memory.allocated)} is allocated by PyTorch, and {_size(memory.free_in_segments)} is reserved by it "
        "but unallocated."
    )


def _size(nbytes: int) -> str:
    """Return a size as the allocator's `format_size` does."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


_plans: dict[Gpu, dict[Any, Any]] = {}
_prepared: list[Callable[[], object]] = []


def prepare(ready: Callable[[], object]) -> None:
    """Have *ready* called before a simulated process first uses a GPU, because it takes a quarter of a second."""
    if ready not in _prepared:
        _prepared.append(ready)


def open_call(comm: Comm) -> CallRecord:
    """Return the first open call that *comm* carries out."""
    call: CallRecord = next((call for call in comm.records if call.state is not State.COMPLETED), comm.record)
    return call


def uuid_of(host: int, index: int) -> str:
    """Return the UUID of GPU *index* of a node."""
    return f"d15751a0-0000-0000-{host:04x}-{index:012x}"


def described(cluster: Cluster, model: Gpu, state: Sequence[tuple[int, int]], now_s: float = 0.0, host: int = 0) -> str:
    """Describe the GPUs of a node for nvidia_smi.py.

    Args:
        cluster: Says how they are connected.
        model: The kind of the GPUs.
        state: MiB in use and utilization in percent of each.
        now_s: Virtual time in seconds.
        host: Number of the node.
    """
    gpus = [
        {
            "index": index,
            "name": model.title,
            "uuid": f"GPU-{uuid_of(host, index)}",
            "bus_id": f"00000000:{index:02X}:00.0",
            "compute_cap": ".".join(map(str, divmod(model.compute_capability, 10))),
            "total_mib": model.memory_bytes >> 20,
            "used_mib": used_mib,
            "utilization": utilization,
        }
        for index, (used_mib, utilization) in enumerate(state)
    ]
    node = {"now": time.asctime(time.gmtime(EPOCH_S + now_s)), "cuda": CUDA_VERSION, "gpus": gpus}
    return json.dumps(node | {"connections": connections(cluster), "cores": cluster.cpu.cores_per_socket})


class Accelerators:
    """The GPUs of one process: all GPUs of its node, created when first used."""

    TOOLS = os.path.join(os.path.dirname(__file__), "tools")
    """Folder on each rank's PATH with imitations of the driver's programs."""
    some_used = False
    """Whether any process of any simulation in this interpreter has used a GPU; otherwise no tensor is on one."""

    def __init__(self, process: SimProcess, count: int) -> None:
        self.process = process
        self.physical = count
        """Number of GPUs of the node."""
        self.count = count
        """Number of GPUs that the process sees."""
        self.used = False
        """Value of torch.cuda.is_initialized(). It is also true if torch only read the current stream."""
        self.works = False
        """Whether the process has selected a GPU or put a tensor on one."""
        self.queued: list[Callable[[], None]] = []
        """Calls that wait for the first use of a GPU (torch.cuda._lazy_call)."""
        self.values = Values(process.port.facts.data)
        self.steps = Steps()
        self.operator: Any = None
        """The last operator that was launched."""
        self.saved = Saved()
        self.capture_stream: Any = None
        """Stream of graph captures that name none."""
        self.capture: Any = None
        """The CUDA graph that is being captured (cuda_api/streams.py)."""
        self.fusion = Fusion() if process.port.facts.data.fuse else None
        """Fusion of the operators under torch.compile (--fuse); None without."""
        self.remote_cost: Callable[[Cost, Sequence[Any]], Cost] | None = None
        """Adds the time of tensors in the memory of peers to a cost; None until the process has such a tensor."""
        self._devices: dict[int, Device] = {}
        self._generators: dict[int, CudaGenerator] = {}

    @functools.cached_property
    def model(self) -> Gpu:
        """Return the model of the GPUs of the process's node."""
        model: Gpu = self.process.port.facts.gpu_on(self.process.slot.host)
        return model

    @functools.cached_property
    def host(self) -> HostCpu:
        """Return the CPU costs of launching work on this cluster."""
        return host_of(self.process.port.facts.cluster.cpu.model, self.model.host_op_s)

    def works_on_host(self, task: RankTask, seconds: float) -> None:
        """Spend *seconds* of the host of *task* on launching work."""
        task.debt_s += seconds
        self.steps.host_s += seconds

    @functools.cached_property
    def plans(self) -> dict[Any, Any]:
        """Return results and costs of operators on GPUs of this model, shared by all simulations of this process."""
        return _plans.setdefault(self.model, {})

    @property
    def slowest(self) -> float:
        """Return the factor by which clock-limited work is slower on the job's slowest GPU than on the median one."""
        return self.model.slowest_of(self.process.port.world_size)

    def __getitem__(self, index: int) -> Device:
        device = self._devices.get(index)
        if device is None:
            if not 0 <= index < self.count:
                raise invalid_ordinal()
            self.begin()
            device = self._devices[index] = Device(self.process, index, self.model)
        return device

    def begin(self) -> None:
        """Initialize the GPUs of the process (torch.cuda.init)."""
        if not self.used:
            for ready in _prepared:
                ready()
            self.used = Accelerators.some_used = True
            queued, self.queued = self.queued, []
            for call in queued:
                call()

    def begin_work(self) -> None:
        """Note that the process works on GPUs, so that its ranks may be compared for equality and sampled."""
        if not self.works:
            self.works = True
            self.process.port.traced.uses_gpu()
            shells = self.process.interpreter.host.environ.get(b"CUDA_VISIBLE_DEVICES", b"").decode(errors="replace")
            if shells and b"CUDA_VISIBLE_DEVICES" not in self.process.interpreter.changed_environ:
                self.process.port.note(
                    f"CUDA_VISIBLE_DEVICES={shells} is ignored, because it describes this machine: a simulated node "
                    f"has all its "
                    f"{self.physical} GPUs; --nproc-per-node N has fewer ranks on it"
                )
            self._note_nccl_settings()

    def _note_nccl_settings(self) -> None:
        """Report NCCL settings in the environment that do not change any simulated time."""
        port = self.process.port
        for note in port.facts.cluster.nccl.ignored(os.environ):
            port.note(note)

    def generator(self, index: int) -> CudaGenerator:
        """Return the default generator of GPU *index*, which works on the host."""
        if not 0 <= index < self.count:
            raise invalid_ordinal()
        result = self._generators.get(index)
        if result is None:
            result = self._generators[index] = CudaGenerator(index, self.process.entropy)
        return result

    @contextlib.contextmanager
    def drawing(self, index: int) -> Iterator[None]:
        """Return a context in which draws from the host's default generator come from that of GPU *index*."""
        own, default = self.generator(index), torch.default_generator
        state = default.get_state()
        default.set_state(own.host_state())
        try:
            yield
        finally:
            own.set_host_state(default.get_state())
            default.set_state(state)

    def description(self) -> dict[str, str]:
        """Return the description of the GPUs for a real program that the rank starts (nvidia_smi.py)."""
        port, host, mib = self.process.port, self.process.slot.host, 1 << 20
        used = dict.fromkeys(range(self.physical), 0)
        for process in port.processes:
            if process.accelerators is not None and process.slot.host == host and process.alive:
                for device in process.accelerators.devices:
                    used[device.index] += (device.memory.reserved + device.model.context_bytes) // mib
        now_s = port.now_s
        state = [
            (used[index], 0 if index not in self._devices else self._devices[index].utilization(now_s))
            for index in range(self.physical)
        ]
        return {
            "DISTSIM_GPUS": described(port.facts.cluster, self.model, state, now_s, host),
            "DISTSIM_PYTHON": sys.executable,
        }

    @property
    def devices(self) -> list[Device]:
        return [self._devices[index] for index in sorted(self._devices)]


def invalid_ordinal() -> torch.AcceleratorError:
    return torch.AcceleratorError("CUDA error: invalid device ordinal\nThe simulated node has fewer GPUs.")
