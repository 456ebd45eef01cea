"""`torch.distributed.Work` of a call on a GPU: waiting for it makes a stream wait, and the host goes on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.futures import Future

from distsim.debug.messages.error_text import message
from distsim.debug.records import CallWait, State
from distsim.sim.c10d.on_gpu.flat_buffer import Flat
from distsim.sim.c10d.on_gpu.futures import written
from distsim.sim.c10d.on_gpu.watchdog import blocking_wait, waited_too_long
from distsim.sim.c10d.work import NO_TIMEOUT, SimWork, drain_backward
from distsim.sim.device.gpu import Device
from distsim.sim.device.streams import current_stream
from distsim.sim.device.timeline import Mark
from distsim.sim.isolation.process import require_task
from distsim.torch_compat.works import CURRENT_GRAPH_TASK_ID, EXECUTION_ENGINE

__all__ = ["GpuWork"]

_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()
_execution_engine = EXECUTION_ENGINE.get()


class GpuWork(SimWork):
    """The handle of a call on a GPU's stream."""

    device: Device
    mark: Mark | None = None
    """The end of its kernel; None until its batch has been put into a stream."""
    stash: Sequence[Tensor] = ()
    """The call's tensors, until it was waited for: their memory is not free before."""
    num_outputs: int = 0
    """So many of them, the last, does the call write to."""
    flat: Flat | None = None
    """Of lists: the tensor that torch made of them, as long."""
    _written: Sequence[weakref.ref[Tensor]] = ()
    """Its outputs, once it was waited for."""
    host_waits = False
    together: Sequence[GpuWork] = ()
    """Of a batch, on its last call, whose handle the program has: those of its other calls."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        task = require_task()
        self.record.waited = True
        if self.mark is not None:
            self.device.wait_for(current_stream(task, self.device), self.mark, task.now_s())
            own = isinstance(timeout, timedelta) and timeout.total_seconds() > 0
            if own or blocking_wait():
                limit_s = timeout.total_seconds() if own else max(0.0, self.expires_s - task.now_s())
                if not self.device.synchronize(task, self.mark, limit_s, own or self._explicit):
                    self._error = waited_too_long(self.record, timeout.total_seconds() if own else self._timeout_s)
                    self.record.state, self.record.error = State.FAILED, message(self._error)
            elif self.host_waits:
                self.device.synchronize(task, self.mark)
        for work in (self, *self.together):
            work.record.waited = True
            work._let_go()
        if self._error is not None:
            raise self._error
        self._was_waited_for()
        return True

    def _let_go(self) -> None:
        """The kernel that is still to run holds this work, and torch's holds no tensor."""
        self.stash, self.flat = (), None
        if self._outputs:
            self._written, self._outputs = [weakref.ref(tensor) for tensor in self._outputs], []

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        task = require_task()
        if not self.done.processed:
            task.poll(CallWait(self.record), task.looks_on(self.record))
        if self.done.processed:
            self.record.waited = True
        return bool(self.done.processed)

    def result(self) -> list[Tensor]:
        return list(self._outputs) or [tensor for tensor in (ref() for ref in self._written) if tensor is not None]

    def get_future(self) -> Future[Any]:
        """Done at once, as torch's is on a GPU: who waits for it makes a stream wait."""
        if self._future is None:
            self._future = Future()
            value = self.result()
            if self.mark is not None:
                written(value, self.mark)
            if self.process.notes.ddp_waits_in_cpp:
                self.wait()
            self._future.set_result(value)
            self.record.waited = True
            self.device.in_flight.forget(self.record)
            if _current_graph_task_id() != -1:  # DDP's reducer waits for it in C++
                notes = self.process.notes
                notes.backward.append(self)
                if len(notes.backward) == 1:
                    process = self.process
                    _execution_engine.queue_callback(lambda: drain_backward(process))
        return self._future
