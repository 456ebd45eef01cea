"""Calls on tensors of a simulated GPU: they run on a stream, as NCCL's do, and the host goes on.

torch's ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, 2.13) gives each communicator a stream of
its own, which first waits for the stream that makes the call; a synchronous call runs on that stream itself; `wait()`
makes the current stream wait; a barrier makes the host wait, too. A batch of sends and receives is one kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future

from distsim.debug.records import P2P, CallWait
from distsim.sim.c10d.work import NO_TIMEOUT, SimWork, drain_backward
from distsim.sim.device.gpu import Device
from distsim.sim.device.streams import accelerators_of, current_stream
from distsim.sim.device.timeline import Comm, Load, Mark, Stream
from distsim.sim.isolation.process import RankTask, require_task

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord
    from distsim.sim.c10d.communicator import Arrival

__all__ = ["Batch", "GpuWork", "HostSide", "compute", "device_of", "host_side", "pend", "put"]

Meet = Callable[[Any], None]
_ROOT_ONLY = frozenset({"broadcast", "scatter", "send"})
"""Operations whose values are those of one member."""


@dataclass(slots=True)
class HostSide:
    """What is known of the values of a member's tensors."""

    inputs: list[Tensor] | None
    """Copies made when the call was; None: unknown."""
    outputs: list[Tensor]
    """The tensors to write to, where their values may be known; else none."""
    guess: bool = False
    before: tuple[Any, ...] = ()
    """What was known of each output's storage."""
    values: Any = None


class GpuWork(SimWork):
    """The handle of a call on a GPU's stream."""

    device: Device
    mark: Mark | None = None
    """The end of its kernel; None until its batch has been put into a stream."""
    stash: Sequence[Tensor] = ()
    """The call's tensors, until it was waited for: their memory is not free before."""
    _written: Sequence[weakref.ref[Tensor]] = ()
    """Its outputs, once it was waited for."""
    host_waits = False
    together: Sequence[CallRecord] = ()
    """Of a batch: all its calls, which have one handle."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        task = require_task()
        self.record.waited = True
        if self.mark is not None:
            self.device.wait_for(current_stream(task, self.device), self.mark, task.now_s())
            if self.host_waits or (isinstance(timeout, timedelta) and timeout.total_seconds() > 0):
                self.device.synchronize(task, self.mark)
        self.stash = ()
        if self._outputs:  # the kernel that is still to run holds this work, and torch's holds no tensor
            self._written, self._outputs = [weakref.ref(tensor) for tensor in self._outputs], []
        for other in self.together:
            other.waited = True
        if self._error is not None:
            raise self._error
        self._was_waited_for()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        task = require_task()
        if not self.done.processed:
            task.poll(CallWait(self.record))
        if self.done.processed:
            self.record.waited = True
        return bool(self.done.processed)

    def result(self) -> list[Tensor]:
        return self._outputs or [tensor for tensor in (ref() for ref in self._written) if tensor is not None]

    def get_future(self) -> Future[Any]:
        """Done at once, as torch's is on a GPU: who waits for it makes a stream wait."""
        if self._future is None:
            self._future = Future()
            self._future.set_result(self.result())
            self.record.waited = True
            if torch._C._current_graph_task_id() != -1:  # DDP's reducer waits for it in C++
                notes = self.process.notes
                notes.backward.append(self)
                if len(notes.backward) == 1:
                    process = self.process
                    torch.autograd.Variable._execution_engine.queue_callback(lambda: drain_backward(process))
        return self._future


class Batch:
    """Calls that are put into a stream as one kernel (`_start_coalescing`, `batch_isend_irecv`)."""

    def __init__(self) -> None:
        self.parts: list[tuple[Arrival, Meet]] = []


def device_of(task: RankTask, tensor: Tensor | None) -> Device:
    """The GPU that a call runs on: its tensors', the current one where it has none."""
    index = task.cuda_device if tensor is None else tensor.device.index
    return accelerators_of(task.process)[index]


def put(task: RankTask, device: Device, stream: Stream, parts: Sequence[tuple[Any, Meet]], load: Load) -> Mark:
    """Put the calls *parts* into *stream* as one kernel, behind what the current stream has so far."""
    now_s = task.now_s()
    current = current_stream(task, device)
    if stream is not current and current.items:
        device.wait_for(stream, device.timeline.mark(current, now_s), now_s)
    left = len(parts)
    comm: Comm

    def begin(_: Comm) -> None:
        for arrival, meet in parts:
            meet(arrival)

    def one_ended(_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            device.ended(comm)

    comm = Comm(now_s + device.model.launch_s, load, begin, parts[0][0].record, [a.record for a, _ in parts])
    for arrival, _ in parts:
        arrival.work.done.callbacks.append(one_ended)
    mark = device.communicate(stream, comm)
    for arrival, _ in parts:
        arrival.work.mark = mark
    return mark


def host_side(task: RankTask, device: Device, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> HostSide:
    """What is known of the call's values; what it writes is not known before it has met the others."""
    values = task.process.accelerators.values
    written = [t for t in outputs if values.keeps(t.numel(), t.dtype)] if _all_kept(values, outputs) else []
    for tensor in outputs:
        if not written:
            values.forget(tensor)
    if outputs and not written:
        return HostSide(None, [], values=values)
    copies: list[Tensor] | None = []
    guess = False
    for tensor in inputs:
        host = values.host(tensor) if values.keeps(tensor.numel(), tensor.dtype) else None
        if host is None:
            copies = None
            break
        guess = guess or values.guessed(tensor)
        copies.append(host.clone())
    before = tuple(values.shadow(tensor) for tensor in written)
    return HostSide(copies, written, guess, before, values)


def _all_kept(values: Any, tensors: Sequence[Tensor]) -> bool:
    return all(values.keeps(t.numel(), t.dtype) for t in tensors)


def pend(side: HostSide, work: GpuWork) -> None:
    """Who looks at what the call writes, waits for it."""

    def force() -> None:
        if not work.done.processed:
            require_task().wait(work.done, CallWait(work.record))

    for tensor in side.outputs:
        side.values.pend(tensor, force)


def compute(members: Sequence[Arrival], data: Callable[[list[Any]], None]) -> None:
    """What a call does to values that are known: *data*, on copies that lie on the host."""
    sides = [member.host_side for member in members]
    record = members[0].record
    if record.op in _ROOT_ONLY:
        root = 0 if record.root is None else record.group.ranks.index(record.root)
        needed = [sides[root]]
    else:
        needed = sides
    known = all(side.inputs is not None for side in needed)
    guess = any(side.guess for side in needed)
    twins = []
    for member, side in zip(members, sides, strict=True):
        outputs = []
        for tensor, before in zip(side.outputs, side.before, strict=True):
            storage = tensor.untyped_storage()
            if before is None:
                storage.__dict__.pop("_distsim_shadow", None)
            else:
                storage._distsim_shadow = before
            host = side.values.host(tensor)
            outputs.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if host is None
                           else host.clone())  # fmt: skip
        inputs = side.inputs if side.inputs is not None else outputs
        twins.append(type(member)(member.process, member.record, member.work, inputs, outputs))
    if known and all(len(t.outputs) == len(m.host_side.outputs) for t, m in zip(twins, members, strict=True)):
        data(twins)
    for place, (twin, side) in enumerate(zip(twins, sides, strict=True)):
        if record.op not in P2P and record.group.ranks[place] != twin.record.rank:
            continue  # somebody else arrived for this member
        for tensor, host in zip(side.outputs, twin.outputs, strict=True):
            side.values.write(tensor, host if known else None, guess)
        side.outputs = []
