"""torch.Event and what torch.cuda.Event stands on, on simulated GPUs: a mark in a stream.

Source of the error texts: ATen/cuda/CUDAEvent.h.
"""

from __future__ import annotations

from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.sim.device import timeline
from distsim.sim.device.cuda_api.ranks import gpu
from distsim.sim.device.gpu import Device
from distsim.sim.device.streams import current_stream
from distsim.sim.isolation.process import RankTask, current_task, require_task

__all__ = ["CALL_S", "CudaEventBase", "Event", "reached"]

CALL_S = 1e-6
"""What a call of the CUDA runtime (cudaEventRecord, cudaStreamWaitEvent, cudaEventQuery) costs the host. An estimate:
traces of Nsight Systems usually show 0.5 to 2 us; nobody has measured it for this."""
_FEW_POLLS = 16
_ADDRESS = 0x6_0000_0000


class Event(torch.Event):
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
        return bool(super().device.type == "cuda")

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
        task.debt_s += CALL_S
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
        task.debt_s += CALL_S
        on.wait_for(simulated, self._mark, task.now_s())

    def query(self) -> bool:
        if not self._simulated:
            return bool(super().query())
        if self._mark is None or self._on is None:
            return True
        return reached(require_task(), self._on, self._mark)

    def synchronize(self) -> None:
        if not self._simulated:
            super().synchronize()
        elif self._mark is not None and self._on is not None:
            task = require_task()
            task.debt_s += CALL_S
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
        return 0 if self._mark is None else _ADDRESS


class CudaEventBase(Event):
    """What stands for `torch._C._CudaEventBase`."""

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


def reached(task: RankTask, on: Device, mark: timeline.Mark, what: object = None) -> bool:
    """Whether it is reached by now. Who asks again and again is woken when it is; the time that the asking takes is not
    counted then, which would pass in steps of a microsecond. *what* is looked at, where it is not the mark."""
    waits = task.looks_on(mark if what is None else what)
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
    """Somebody looks at the mark: the simulation's clock comes by when it is reached."""
