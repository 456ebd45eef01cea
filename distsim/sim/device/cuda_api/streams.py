"""torch.Stream and what torch.cuda.Stream stands on, on simulated GPUs.

Source: c10/cuda/CUDAStream.cpp (a pool of 32 streams for each priority).
"""

from __future__ import annotations

from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.sim.device import timeline
from distsim.sim.device.cuda_api.events import CALL_S, reached
from distsim.sim.device.cuda_api.ranks import gpu
from distsim.sim.device.gpu import Device
from distsim.sim.device.streams import current_device, current_stream, set_current_device, set_current_stream
from distsim.sim.isolation.process import RankTask, current_task, require_task

__all__ = ["CUDA", "CudaStreamBase", "Stream", "handle", "make_current", "new_stream"]

CUDA = 1
"""c10::DeviceType::CUDA."""
_POOL = 32
"""Streams of one priority (kStreamsPerPool): who asks for more gets those again."""
_LEAST_PRIORITY, _GREATEST_PRIORITY = 0, -3
"""`max_compile_time_stream_priorities` is 4."""

_PlainStream: Any = torch.Stream


class Stream(torch.Stream):
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
        return super().__new__(cls, stream_id=made.number, device_index=on.index, device_type=CUDA)

    @property
    def _distsim_stream(self) -> timeline.Stream | None:
        """None: it is the host's."""
        if self.device_type != CUDA:
            return None
        return gpu(require_task(), self.device_index).streams[self.stream_id]

    def query(self) -> bool:
        simulated = self._distsim_stream
        if simulated is None:
            return bool(super().query())
        task = require_task()
        on = gpu(task, self.device_index)
        last = simulated.items[-1] if simulated.items else None  # who asks again has put a mark there
        mark = last if isinstance(last, timeline.Mark) else on.timeline.mark(simulated, task.now_s())
        return reached(task, on, mark, simulated)

    def synchronize(self) -> None:
        simulated = self._distsim_stream
        if simulated is None:
            super().synchronize()
            return
        task = require_task()
        on = gpu(task, self.device_index)
        task.debt_s += CALL_S
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
            event = torch.Event(device=self.device)
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False if self.device_type == CUDA else super().is_capturing()

    @property
    def nativehandle(self) -> Any:
        return handle(self) if self.device_type == CUDA else super().native_handle

    def __enter__(self) -> Any:
        if self.device_type != CUDA:
            return super().__enter__()
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
        if self.device_type != CUDA:
            return super().__exit__(*raised)
        task = require_task()
        before, stream, there = self._before
        make_current(task, self.device_index, there)
        make_current(task, before, stream)
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
        return _PlainStream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)

    @property
    def cuda_stream(self) -> int:
        return handle(self)

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


def handle(stream: Any) -> int:
    """An address for it; the default stream's is null."""
    number = int(stream.stream_id)
    return 0 if not number else 0x5_0000_0000 + (int(stream.device_index) << 24) + (number << 8)


def make_current(task: RankTask, index: int, stream: timeline.Stream | None) -> None:
    if index != current_device(task):
        set_current_device(task, index)
    on = gpu(task, index)
    set_current_stream(task, on, stream or on.default_stream)
