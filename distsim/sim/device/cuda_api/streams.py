"""torch.cuda.Stream, torch.cuda.Event, torch.Stream and torch.Event on simulated GPUs.

torch's Python classes stand on two of C++ (`torch._C._CudaStreamBase`, `_CudaEventBase`), which derive from
torch.Stream and torch.Event. Here stand others in their place, and torch's own `torch/cuda/streams.py` is run once more
on top of them.

Sources: c10/cuda/CUDAStream.cpp (a pool of 32 streams for each priority), ATen/cuda/CUDAEvent.h (error texts).
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch

from distsim.debug.records import HostWait
from distsim.errors import NotSimulated
from distsim.sim.device import timeline
from distsim.sim.device.cuda_api.ranks import (
    Patch,
    accelerators,
    for_ranks,
    gpu,
    only_ranks,
    visible_devices,
    with_gpus,
)
from distsim.sim.device.gpu import Device, invalid_ordinal
from distsim.sim.device.streams import current_device, current_stream, set_current_device, set_current_stream
from distsim.sim.isolation.process import RankTask, current_task, require_task

__all__ = ["stream_patches"]

_CUDA = 1
"""c10::DeviceType::CUDA."""
_POOL = 32
"""Streams of one priority (kStreamsPerPool): who asks for more gets those again."""
_LEAST_PRIORITY, _GREATEST_PRIORITY = 0, -3
"""`max_compile_time_stream_priorities` is 4."""
_CALL_S = 1e-6
"""What a call of the CUDA runtime costs the host: cudaEventRecord, cudaStreamWaitEvent and cudaEventQuery take 0.5 to
2 us (nsys traces in NVIDIA's "Understanding the Overheads of Launching CUDA Kernels", 2019: about 1 us)."""
_FEW_POLLS = 16

_PlainStream, _PlainEvent = torch.Stream, torch.Event


class Stream(_PlainStream):
    """torch.Stream, on simulated GPUs as well."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None:
            return super().__new__(cls, *args, **kwargs)
        if args and isinstance(args[0], int) and len(args) == 3:
            kwargs.update(zip(("stream_id", "device_index", "device_type"), args, strict=True))
            args = ()
        if "stream_id" in kwargs:
            kwargs.pop("priority", None)
            return super().__new__(cls, **kwargs)
        device = args[0] if args else kwargs.get("device")
        if device is None:
            device = torch.accelerator.current_accelerator() or "cpu"
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if found.type != "cuda":
            return super().__new__(cls, *args, **kwargs)
        on = gpu(task, found.index)
        made = new_stream(on, kwargs.get("priority", 0))
        return super().__new__(cls, stream_id=made.number, device_index=on.index, device_type=_CUDA)

    @property
    def _distsim_stream(self) -> timeline.Stream | None:
        """None: it is the host's."""
        if self.device_type != _CUDA:
            return None
        return gpu(require_task(), self.device_index).streams[self.stream_id]

    def query(self) -> bool:
        simulated = self._distsim_stream
        if simulated is None:
            return bool(super().query())
        task = require_task()
        on = gpu(task, self.device_index)
        return _reached(task, on, on.timeline.mark(simulated, task.now_s()))

    def synchronize(self) -> None:
        simulated = self._distsim_stream
        if simulated is None:
            super().synchronize()
            return
        task = require_task()
        on = gpu(task, self.device_index)
        task.debt_s += _CALL_S
        on.synchronize(task, on.timeline.mark(simulated, task.now_s()))

    def wait_event(self, event: Any) -> None:
        if self._distsim_stream is None:
            super().wait_event(event)
        else:
            event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        if self._distsim_stream is None:
            super().wait_stream(stream)
        else:
            self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        if self._distsim_stream is None:
            return super().record_event(event)
        if event is None:
            event = Event(device=self.device)
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False if self.device_type == _CUDA else super().is_capturing()

    @property
    def native_handle(self) -> Any:
        return _handle(self) if self.device_type == _CUDA else super().native_handle

    def __enter__(self) -> Any:
        if self.device_type != _CUDA:
            return super().__enter__()
        task = require_task()
        before = current_device(task)
        self._before = (
            before,
            current_stream(task, gpu(task, before)),
            current_stream(task, gpu(task, self.device_index)),
        )
        _make_current(task, self.device_index, self._distsim_stream)
        return self

    def __exit__(self, *raised: Any) -> Any:
        if self.device_type != _CUDA:
            return super().__exit__(*raised)
        task = require_task()
        before, stream, there = self._before
        _make_current(task, self.device_index, there)
        _make_current(task, before, stream)
        return False


class CudaStreamBase(Stream):
    """What stands for `torch._C._CudaStreamBase`."""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0,
                stream_ptr: int = 0) -> Any:  # fmt: skip
        if stream_ptr:
            raise NotSimulated("torch.cuda.ExternalStream", "use torch.cuda.Stream()")
        if not (stream_id or device_index or device_type):
            on = gpu(require_task())
            stream_id, device_index = new_stream(on, priority).number, on.index
        return _PlainStream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=_CUDA)

    @property
    def cuda_stream(self) -> int:
        return _handle(self)

    @property
    def priority(self) -> int:
        found = self._distsim_stream
        return 0 if found is None else found.priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return _LEAST_PRIORITY, _GREATEST_PRIORITY


def new_stream(on: Device, priority: int) -> timeline.Stream:
    """The next one of the pool of *priority*."""
    priority = max(_GREATEST_PRIORITY, min(_LEAST_PRIORITY, priority))
    pool = on.pools.setdefault(priority, [])
    turn = on.pool_turns.get(priority, 0)
    on.pool_turns[priority] = turn + 1
    if len(pool) < _POOL:
        made = on.new_stream(f"stream {len(on.streams)}")
        made.priority = priority
        pool.append(made)
    return pool[turn % _POOL]


def _handle(stream: Any) -> int:
    """An address for it; the default stream's is null."""
    number = int(stream.stream_id)
    return 0 if not number else 0x5_0000_0000 + (int(stream.device_index) << 24) + (number << 8)


class Event(_PlainEvent):
    """torch.Event, on simulated GPUs as well."""

    _mark: timeline.Mark | None = None
    _on: Device | None = None
    _timed = False

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False,
                interprocess: bool = False) -> Any:  # fmt: skip
        if current_task() is None:
            return super().__new__(
                cls, device, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )
        if device is None:
            device = torch.accelerator.current_accelerator() or "cpu"
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if interprocess and found.type == "cuda":
            raise NotSimulated(
                "torch.Event(interprocess=True)", "ranks share no GPU memory: synchronize by collectives"
            )
        made = super().__new__(cls, found, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        made._timed = enable_timing
        return made

    @property
    def _simulated(self) -> bool:
        return super().device.type == "cuda"

    def record(self, stream: Any = None) -> None:
        if not self._simulated:
            super().record(*(() if stream is None else (stream,)))
            return
        task = require_task()
        if stream is None:
            on = gpu(task)
            simulated = current_stream(task, on)
        else:
            on, simulated = gpu(task, stream.device_index), stream._distsim_stream
        if self._on is not None and self._on is not on:
            raise RuntimeError(f"Event device {self._on.index} does not match recording stream's device {on.index}.")
        self._on = on
        task.debt_s += _CALL_S
        self._mark = on.timeline.mark(simulated, task.now_s())

    def wait(self, stream: Any = None) -> None:
        if not self._simulated:
            super().wait(*(() if stream is None else (stream,)))
            return
        if self._mark is None:
            return
        task = require_task()
        if stream is None:
            on = gpu(task)
            simulated = current_stream(task, on)
        else:
            on, simulated = gpu(task, stream.device_index), stream._distsim_stream
        task.debt_s += _CALL_S
        on.wait_for(simulated, self._mark, task.now_s())

    def query(self) -> bool:
        if not self._simulated:
            return bool(super().query())
        if self._mark is None or self._on is None:
            return True
        return _reached(require_task(), self._on, self._mark)

    def synchronize(self) -> None:
        if not self._simulated:
            super().synchronize()
        elif self._mark is not None and self._on is not None:
            task = require_task()
            task.debt_s += _CALL_S
            self._on.synchronize(task, self._mark)

    def elapsed_time(self, end_event: Any) -> float:
        if not self._simulated:
            return float(super().elapsed_time(end_event))
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
        return super().device if not self._simulated or self._on is None else self._on.torch_device

    @property
    def event_id(self) -> int:
        return 0 if self._mark is None else id(self._mark)


class CudaEventBase(Event):
    """What stands for `torch._C._CudaEventBase`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                external: bool = False) -> Any:  # fmt: skip
        return Event.__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def cuda_event(self) -> int:
        return 0 if self._mark is None else 0x6_0000_0000

    @property
    def device(self) -> Any:
        return None if self._on is None else self._on.torch_device


def _reached(task: RankTask, on: Device, mark: timeline.Mark) -> bool:
    """Whether it is reached by now. Who asks again and again is woken when it is."""
    polls = task.quiet_polls
    task.debt_s += _CALL_S
    task.flush()
    if on.timeline.reached(mark):
        return True
    if polls < _FEW_POLLS:
        task.quiet_polls = polls + 1
        return False
    on.timeline.when_reached(mark, _nothing)
    task.poll(HostWait("its GPU"))
    return on.timeline.reached(mark)


def _nothing() -> None:
    """Somebody looks at the mark: the simulation's clock comes by when it is reached."""


# -- the functions of torch._C


def _make_current(task: RankTask, index: int, stream: timeline.Stream | None) -> None:
    if index != current_device(task):
        set_current_device(task, index)
    on = gpu(task, index)
    set_current_stream(task, on, stream or on.default_stream)


def _set_stream(task: RankTask, stream_id: int, device_index: int, device_type: int) -> None:
    _make_current(task, device_index, gpu(task, device_index).streams[stream_id])


def _get_stream(task: RankTask, index: int) -> tuple[int, int, int]:
    on = gpu(task, index)
    return current_stream(task, on).number, on.index, _CUDA


def _get_default(task: RankTask, index: int) -> tuple[int, int, int]:
    return 0, gpu(task, index).index, _CUDA


def _raw(task: RankTask, index: int) -> int:
    on = gpu(task, index)
    return _handle(_PlainStream(stream_id=current_stream(task, on).number, device_index=on.index, device_type=_CUDA))


def _accelerator_stream(task: RankTask, index: int) -> Stream:
    number, found, kind = _get_stream(task, index)
    made: Stream = Stream(stream_id=number, device_index=found, device_type=kind)
    return made


def _accelerator_set_stream(task: RankTask, stream: Any) -> None:
    _set_stream(task, stream.stream_id, stream.device_index, stream.device_type)


def _exchange(task: RankTask, index: int) -> int:
    """The old one; a negative number changes nothing."""
    if index < 0:
        return -1
    old = current_device(task)
    if index != old:
        _set_device(task, index)
    return old


def _set_device(task: RankTask, index: int) -> None:
    if not 0 <= index < visible_devices(task):
        raise invalid_ordinal()
    set_current_device(task, index)


def _synchronize(task: RankTask, index: int | None = None) -> None:
    on = gpu(task, index)
    task.debt_s += _CALL_S
    on.synchronize_all(task)


@functools.cache
def _on_top() -> ModuleType:
    """torch/cuda/streams.py, its classes derived from ours."""
    spec = importlib.util.find_spec("torch.cuda.streams")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = torch._C._CudaStreamBase, torch._C._CudaEventBase
    torch._C._CudaStreamBase, torch._C._CudaEventBase = CudaStreamBase, CudaEventBase
    try:
        spec.loader.exec_module(module)
    finally:
        torch._C._CudaStreamBase, torch._C._CudaEventBase = before
    return module


def stream_patches() -> list[Patch]:
    """(holder, attribute, replacement) of streams, events and the current device."""
    core, ours = torch._C, _on_top()
    patches: list[Patch] = [
        (core, "_CudaStreamBase", CudaStreamBase),
        (core, "_CudaEventBase", CudaEventBase),
        (core, "Stream", Stream),
        (core, "Event", Event),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
    ]
    for holder in (torch.cuda, torch.cuda.streams):
        patches += [(holder, name, getattr(ours, name)) for name in ("Stream", "ExternalStream", "Event")]
    for name, answer in (
        ("getDevice", lambda task: (accelerators(task), current_device(task))[1]),
        ("setDevice", _set_device),
        ("exchangeDevice", _exchange),
        ("maybeExchangeDevice", _exchange),
        ("getDeviceCount", visible_devices),
        ("getCurrentStream", _get_stream),
        ("getDefaultStream", _get_default),
        ("setStream", _set_stream),
        ("getCurrentRawStream", _raw),
        ("synchronize", _synchronize),
    ):
        real = getattr(core, f"_cuda_{name}", None)
        call = only_ranks(name, answer) if real is None else for_ranks(real, answer)
        patches.append((core, f"_cuda_{name}", call))
    for name, answer in (
        ("getDeviceIndex", lambda task: current_device(task)),
        ("setDeviceIndex", lambda task, index: _set_device(task, index) if index >= 0 else None),
        ("exchangeDevice", _exchange),
        ("maybeExchangeDevice", _exchange),
        ("getStream", _accelerator_stream),
        ("setStream", _accelerator_set_stream),
        ("synchronizeDevice", _synchronize),
    ):
        patches.append((core, f"_accelerator_{name}", with_gpus(getattr(core, f"_accelerator_{name}"), answer)))
    exchanged = {name: value for holder, name, value in patches if holder is core}
    patches += [
        (torch.cuda, "_exchange_device", exchanged["_cuda_exchangeDevice"]),
        (torch.cuda, "_maybe_exchange_device", exchanged["_cuda_maybeExchangeDevice"]),
    ]
    return patches
