"""torch.cuda's streams, events and graphs."""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.kernels import Cost
from distsim.sim.device import timeline
from distsim.sim.device.cuda_api.tensors import accelerators, gpu, with_gpus
from distsim.sim.device.gpu import Accelerators, Device
from distsim.sim.device.memory import current_device, current_stream, set_current_device, set_current_stream
from distsim.sim.device.operators.values import KNOWLEDGE
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, current_task, not_ordered, require_task
from distsim.sim.isolation.wraps import class_for_ranks
from distsim.torch_compat.cuda_api import HOST_EMPTY_CACHE

# -- torch.Event and what torch.cuda.Event stands on, on simulated GPUs: a mark in a stream.
#
# Source of the error texts: ATen/cuda/CUDAEvent.h.

CALL_S = 1e-6
"""Host seconds of a call of the CUDA runtime (cudaEventRecord, cudaStreamWaitEvent, cudaEventQuery).

Estimate: traces of Nsight Systems usually show 0.5 to 2 us; it was not measured for this.
"""
_FEW_POLLS = 16
_ADDRESS = 0x6_0000_0000


_PlainEvent: Any = torch.Event
_PlainStream: Any = torch.Stream


class _OfDevices(type):
    """Metaclass of `Event` and `Stream`: those of the host, which are torch's own, are instances of them as well."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kinds: dict[type, type] = {Event: _PlainEvent, Stream: _PlainStream}
        kind = kinds.get(cls)
        return isinstance(instance, kind) if kind is not None else super().__instancecheck__(instance)


class Event(torch.Event, metaclass=_OfDevices):
    """torch.Event on simulated GPUs."""

    _mark: timeline.Mark | None = None
    _on: Device | None = None
    _timed = False

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False,
                interprocess: bool = False) -> Any:  # fmt: skip
        if current_task() is not None:
            device = _device(device)
        if current_task() is None or device.type != "cuda":
            return _PlainEvent(device, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        if interprocess:
            raise NotSimulated(
                "torch.Event(interprocess=True)", "ranks share no GPU memory: synchronize by collectives"
            )
        result = super().__new__(cls, device, enable_timing=enable_timing, blocking=blocking)
        result._timed = enable_timing
        return result

    def record(self, stream: Any = None) -> None:
        task = require_task()
        if stream is None:
            on = gpu(task)
            simulated = current_stream(task, on)
        else:
            on, simulated = gpu(task, stream.device_index), stream._distsim_stream
        if self._on is not None and self._on is not on:
            raise RuntimeError(f"Event device {self._on.index} does not match recording stream's device {on.index}.")
        self._on = on
        task.debt_s += CALL_S
        self._mark = on.timeline.mark(simulated, task.now_s())

    def wait(self, stream: Any = None) -> None:
        if self._mark is None:
            return
        task = require_task()
        if stream is None:
            on = gpu(task)
            simulated = current_stream(task, on)
        else:
            on, simulated = gpu(task, stream.device_index), stream._distsim_stream
        task.debt_s += CALL_S
        on.wait_for(simulated, self._mark, task.now_s())

    def query(self) -> bool:
        if self._mark is None or self._on is None:
            return True
        return reached(require_task(), self._on, self._mark)

    def synchronize(self) -> None:
        if self._mark is not None and self._on is not None:
            task = require_task()
            task.debt_s += CALL_S
            self._on.synchronize(task, self._mark)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._mark is None or end_event._mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * float(end_event._mark.reached_s - self._mark.reached_s)

    def ipc_handle(self) -> Any:
        raise NotSimulated("Event.ipc_handle", "ranks share no GPU memory: synchronize by collectives")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        raise NotSimulated("Event.from_ipc_handle", "ranks share no GPU memory: synchronize by collectives")

    @property
    def device(self) -> Any:
        return super().device if self._on is None else self._on.torch_device

    @property
    def event_id(self) -> int:
        return 0 if self._mark is None else _ADDRESS


def _device(device: Any) -> torch.device:
    """Return the device of a new event or stream: a GPU for a number, and by default the accelerator."""
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class CudaEventBase(Event):
    """Replacement for `torch._C._CudaEventBase`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                external: bool = False) -> Any:  # fmt: skip
        gpu(require_task())
        return Event.__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def cuda_event(self) -> int:
        return 0 if self._mark is None else _ADDRESS

    @property
    def device(self) -> Any:
        return None if self._on is None else self._on.torch_device


def reached(task: RankTask, on: Device, mark: timeline.Mark, looked_at: object = None) -> bool:
    """Return whether *mark* is reached.

    A thread that polls is woken when it is. The time of polling, which would pass in steps of a microsecond, does
    not count then. *looked_at* is the polled object, if it is not the mark.
    """
    not_ordered("asks whether a GPU has finished")
    waits = task.looks_on(mark if looked_at is None else looked_at)
    if not waits and task.quiet_polls < _FEW_POLLS:
        polls = task.quiet_polls
        task.debt_s += CALL_S
        task.flush()
        task.quiet_polls = polls + 1
        return on.timeline.reached(mark)
    if on.timeline.reached(mark):
        return True
    on.timeline.when_reached(mark, _nothing)
    task.poll(on.why(), waits)
    return on.timeline.reached(mark)


def _nothing() -> None:
    """Do nothing. As a callback on a mark, it makes the simulation's clock stop when the mark is reached."""


# -- torch.Stream and what torch.cuda.Stream stands on, on simulated GPUs.
#
# Source: c10/cuda/CUDAStream.cpp (a pool of 32 streams for each priority).

CUDA_TYPE = 1
"""c10::DeviceType::CUDA."""
_POOL = 32
"""Streams of one priority (kStreamsPerPool): who asks for more gets those again."""
_LEAST_PRIORITY, _GREATEST_PRIORITY = 0, -3
"""`max_compile_time_stream_priorities` is 4."""


class Stream(torch.Stream, metaclass=_OfDevices):
    """torch.Stream on simulated GPUs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None:
            return _PlainStream(*args, **kwargs)
        if args and isinstance(args[0], int) and len(args) == 3:
            kwargs.update(zip(("stream_id", "device_index", "device_type"), args, strict=True))
            args = ()
        if "stream_id" in kwargs:
            kwargs.pop("priority", None)
            return _PlainStream.__new__(cls if kwargs["device_type"] == CUDA_TYPE else _PlainStream, **kwargs)
        device = _device(args[0] if args else kwargs.get("device"))
        if device.type != "cuda":
            return _PlainStream(*args, **kwargs)
        on = gpu(task, device.index)
        stream = new_stream(on, kwargs.get("priority", 0))
        return super().__new__(cls, stream_id=stream.number, device_index=on.index, device_type=CUDA_TYPE)

    @property
    def _distsim_stream(self) -> timeline.StreamTimeline:
        """Stream of the rank."""
        return gpu(require_task(), self.device_index).streams[self.stream_id]

    def query(self) -> bool:
        task, simulated = require_task(), self._distsim_stream
        on = gpu(task, self.device_index)
        last = simulated.items[-1] if simulated.items else None  # who asks again has put a mark there
        mark = last if isinstance(last, timeline.Mark) else on.timeline.mark(simulated, task.now_s())
        return reached(task, on, mark, simulated)

    def synchronize(self) -> None:
        task = require_task()
        on = gpu(task, self.device_index)
        task.debt_s += CALL_S
        on.synchronize(task, on.timeline.mark(self._distsim_stream, task.now_s()))

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        if event is None:
            event = torch.Event(device=self.device)
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    @property
    def nativehandle(self) -> Any:
        return handle(self)

    def __enter__(self) -> Any:
        task = require_task()
        before = current_device(task)
        self._before = (
            before,
            current_stream(task, gpu(task, before)),
            current_stream(task, gpu(task, self.device_index)),
        )
        make_current(task, self.device_index, self._distsim_stream)
        return self

    def __exit__(self, *raised: Any) -> Any:
        task = require_task()
        before, stream, there = self._before
        make_current(task, self.device_index, there)
        make_current(task, before, stream)
        return False


class CudaStreamBase(Stream):
    """Replacement for `torch._C._CudaStreamBase`."""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0,
                stream_ptr: int = 0) -> Any:  # fmt: skip
        if stream_ptr:
            raise NotSimulated("torch.cuda.ExternalStream", "use torch.cuda.Stream()")
        if not (stream_id or device_index or device_type):
            on = gpu(require_task())
            stream_id, device_index = new_stream(on, priority).number, on.index
        return _PlainStream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA_TYPE)

    @property
    def cuda_stream(self) -> int:
        return handle(self)

    @property
    def priority(self) -> int:
        return self._distsim_stream.priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return _LEAST_PRIORITY, _GREATEST_PRIORITY


def new_stream(on: Device, priority: int) -> timeline.StreamTimeline:
    """Return the next stream of the pool of *priority*."""
    priority = max(_GREATEST_PRIORITY, min(_LEAST_PRIORITY, priority))
    pool = on.pools.setdefault(priority, [])
    turn = on.pool_turns.get(priority, 0)
    on.pool_turns[priority] = turn + 1
    if len(pool) < _POOL:
        stream = on.new_stream(f"stream {len(on.streams)}")
        stream.priority = priority
        pool.append(stream)
    return pool[turn % _POOL]


def handle(stream: Any) -> int:
    """Return an address for a stream; the default stream's is null."""
    number = int(stream.stream_id)
    return 0 if not number else 0x5_0000_0000 + (int(stream.device_index) << 24) + (number << 8)


def make_current(task: RankTask, index: int, stream: timeline.StreamTimeline | None) -> None:
    if index != current_device(task):
        set_current_device(task, index)
    on = gpu(task, index)
    set_current_stream(task, on, stream or on.default_stream)


# -- CUDA graphs: captured kernels are launched again by one call of the host.
#
# torch's own `torch.cuda.graph` and `make_graphed_callables` run on `CUDAGraph` here. Within a capture no kernel runs;
# a replay puts all of them, in order, into the stream that it is called on, and nobody knows what they write.

LAUNCH_S, NODE_S = 2.5e-6, 1e-9
"""Host seconds of cudaGraphLaunch, and of each node.

Source: NVIDIA's technical blog, "Constant Time Launch for Straight-Line CUDA Graphs and Other Performance
Enhancements", September 2024.
"""
_pools = itertools.count(1)


class Capture:
    """Content of one graph: kernels, storages that they write, and what they add to the sums of a step."""

    def __init__(self, gpus: Accelerators) -> None:
        self._gpus = gpus
        self._put_held_back()
        self.kernels: list[tuple[Device, Cost, Any]] = []
        self.written: list[weakref.ref[torch.UntypedStorage]] = []
        self.ends: list[Any] = []
        """Optimizers whose step ended during the capture."""
        self.pool = (0, next(_pools))
        gpus.capture, gpus.values.written = self, self.written
        gpus.steps.begin_capture(self.ends)
        self.added: tuple[dict[Any, int], ...] = ()

    def close(self) -> None:
        """End the capture."""
        self._put_held_back()
        self._gpus.capture = self._gpus.values.written = None
        self.added = self._gpus.steps.end_capture()

    def _put_held_back(self) -> None:
        for device in self._gpus.devices:
            device.put_held_back()

    def replay(self, task: RankTask) -> None:
        """Launch it."""
        task.process.accelerators.works_on_host(task, LAUNCH_S + NODE_S * len(self.kernels))
        for device, cost, name in self.kernels:
            device.launch(current_stream(task, device), cost, task, name)
        for reference in self.written:
            storage = reference()
            for name in KNOWLEDGE if storage is not None else ():
                storage.__dict__.pop(name, None)
        self._gpus.steps.add(self.added)
        for optimizer in self.ends:
            device = self._gpus[task.cuda_device]
            self._gpus.steps.end(optimizer, device.timeline, current_stream(task, device), task.now_s())
        traced = task.port.traced
        if traced.counts and task not in traced.apart:
            traced.saw_operator(task.process.rank, None)


class Graph:
    """Replacement for torch.cuda.CUDAGraph in a rank."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured: Capture | None = None
        """What it replays; None before a capture."""

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        task = require_task()
        gpus = accelerators(task)
        if task.port.facts.data.real:
            raise NotSimulated("torch.cuda.CUDAGraph with --data real", "simulate without --data real")
        if gpus.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.captured = Capture(gpus)

    def capture_end(self) -> None:
        if self.captured is None:
            raise RuntimeError("capture_end() called before capture_begin()")
        self.captured.close()
        if not self.captured.kernels:
            warnings.warn("The CUDA Graph is empty: nothing was captured", stacklevel=2)

    def replay(self) -> None:
        if self.captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.captured.replay(require_task())

    def pool(self) -> tuple[int, int]:
        if self.captured is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.captured.pool

    def reset(self) -> None:
        self.captured = None

    def instantiate(self) -> None:
        """Do nothing: a replay uses the kernels as captured."""

    enable_debug_mode = instantiate

    def debug_dump(self, debug_path: str) -> None:
        raise NotSimulated("CUDAGraph.debug_dump", "the report lists the operators that took longest")


def _is_capturing(task: RankTask) -> bool:
    gpus = task.process.accelerators
    return gpus is not None and gpus.capture is not None


def _graph_class(real: type) -> type:
    """Return torch.cuda.graph with a separate default stream for each process."""

    def __init__(self: Any, cuda_graph: Any, pool: Any = None, stream: Any = None, *args: Any, **kwargs: Any) -> None:
        task = current_task()
        if task is not None and stream is None:
            gpus = accelerators(task)
            stream = gpus.capture_stream = gpus.capture_stream or torch.cuda.Stream()
        real.__init__(self, cuda_graph, pool, stream, *args, **kwargs)  # type: ignore[misc]

    return type(real.__name__, (real,), {"__init__": __init__})


def graph_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement)."""
    graphs = torch.cuda.graphs
    ours = {
        "graph": _graph_class(graphs.graph),
        "CUDAGraph": class_for_ranks(graphs.CUDAGraph, Graph),
        "graph_pool_handle": with_gpus(graphs.graph_pool_handle, lambda task: (0, next(_pools))),
        "is_current_stream_capturing": with_gpus(graphs.is_current_stream_capturing, _is_capturing),
    }
    empty = HOST_EMPTY_CACHE.get(None)
    cache = (lambda: None) if empty is None else with_gpus(empty, lambda task: None)
    patches: list[Patch] = [(HOST_EMPTY_CACHE.holder(), HOST_EMPTY_CACHE.attribute, cache)]
    return patches + [(holder, name, value) for name, value in ours.items() for holder in (torch.cuda, graphs)]
