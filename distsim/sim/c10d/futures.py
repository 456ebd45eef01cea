"""Futures of works on simulated GPUs: their values are complete when the stream has reached them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from distsim.debug.records.frames import is_ours
from distsim.sim.device.gpu import Device
from distsim.sim.device.memory import accelerators_of, current_stream, set_current_stream
from distsim.sim.device.timeline import Mark, StreamTimeline
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.kernel.clocks import Clock
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.task import is_done, made_of
from distsim.sim.kernel.turns import asking_line, name_of
from distsim.sim.orders.processes import take_turn
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID, FUTURE

_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()

_Base = FUTURE.get()
_real_then, _real_add, _real_set = _Base.then, _Base.add_done_callback, _Base.set_result
_real_init = Future.__init__
_AFTER = "_distsim_written"
_CALLBACKS = 1
"""Key of the callback streams in Device.pools, which is not a stream priority."""


def written(tensors: Iterable[Tensor], mark: Mark) -> None:
    """Record that *tensors* on GPUs, the value of a future, are complete at *mark*."""
    for tensor in tensors:
        setattr(tensor.untyped_storage(), _AFTER, mark)


def have_stream_wait(task: RankTask, value: object) -> None:
    """Make the current stream of *task* wait for *value*, because the task has waited for its future."""
    if not _uses_gpus(task):
        return
    for device, marks in _to_come(task, value):
        for mark in marks:
            device.wait_for(current_stream(task, device), mark, task.now_s())


class InBackward:
    """A future of *value* that was made in backward: DDP's reducer waits for it in C++, when backward ends."""

    def __init__(self, task: RankTask, value: object) -> None:
        self._task = task
        self._value = value

    def wait(self) -> None:
        have_stream_wait(self._task, self._value)


def _uses_gpus(task: RankTask) -> bool:
    return task.process.accelerators is not None and bool(task.process.accelerators.works)


def _to_come(task: RankTask, value: object) -> list[tuple[Device, list[Mark]]]:
    """Return when *value* is complete on each GPU that holds a part of it."""
    marks_by_device: dict[int, dict[int, Mark]] = {}
    for tensor in _on_gpus(value):
        mark = tensor.untyped_storage().__dict__.get(_AFTER)
        if mark is not None:
            marks_by_device.setdefault(tensor.device.index, {})[id(mark)] = mark
    return [(accelerators_of(task.process)[index], list(marks.values())) for index, marks in marks_by_device.items()]


def _on_gpus(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _on_gpus(part)
    elif isinstance(value, dict):
        yield from _on_gpus(list(value.values()))
    elif isinstance(value, _Base) and is_done(value):  # of collect_all
        yield from _on_gpus(_value_of(value))


def _value_of(future: Any) -> object:
    """Return the value of a future, or None if it has an error."""
    try:
        return future.value()
    except Exception:
        return None


def _free_stream(device: Device) -> StreamTimeline:
    """Return a stream of the pool on which nothing runs.

    torch cycles through 32 streams. Each stream that exists slows all kernels of the simulation a little, and only
    streams that are busy at the same time can be told apart.
    """
    pool = device.pools.setdefault(_CALLBACKS, [])
    for stream in pool:
        if not stream.items:
            return stream
    pool.append(device.new_stream(f"callbacks {len(pool)}" if pool else "callbacks"))
    return pool[-1]


def _on_streams(callback: Callable[[Any], Any], gives: bool) -> Callable[[Any], Any]:
    """Wrap a future's *callback* as torch calls it. *gives* says that its result is the value of another future."""

    def called(future: Any) -> Any:
        task = current_task()
        if task is None or not _uses_gpus(task) or not (on := _to_come(task, _value_of(future))):
            return callback(future)
        before = [current_stream(task, device) for device, _ in on]
        for device, marks in on:
            stream = _free_stream(device)
            for mark in marks:
                device.wait_for(stream, mark, task.now_s())
            set_current_stream(task, device, stream)
        try:
            value = callback(future)
            if gives:
                _complete(task, value, [device for device, _ in on])
        finally:
            for (device, _), stream in zip(on, before, strict=True):
                set_current_stream(task, device, stream)
        return value

    return called


def _complete(task: RankTask, value: object, devices: Iterable[Device]) -> None:
    """Set *value* as the value of a future of *devices*."""
    by_index = {device.index: device for device in devices}
    tensors = [tensor for tensor in _on_gpus(value) if tensor.device.index in by_index]
    for index in {tensor.device.index for tensor in tensors}:
        device = by_index[index]
        mark = device.timeline.mark(current_stream(task, device), task.now_s())
        written([tensor for tensor in tensors if tensor.device.index == index], mark)
    if tensors and _current_graph_task_id() != -1:
        task.process.groups.backward.append(InBackward(task, tensors))


@dataclass(slots=True)
class _PlainFuture:
    """A future that the program makes, in an exploration, with those that its callbacks complete."""

    name: Hashable
    clock: Clock = field(default_factory=dict)
    """Clock of what has set it."""


plain_futures: weakref.WeakKeyDictionary[Any, _PlainFuture] = weakref.WeakKeyDictionary()


def take_turn_at(future: Any, label: str, access: Access) -> bool:
    """Wait for the turn of an operation on a future in an exploration; return False if another than the program made
    the future.
    """
    task, plain = current_task(), plain_futures.get(future)
    if task is None or plain is None:
        return False
    take_turn(task, label, {plain.name: access})
    if access is Access.WRITE:
        plain.clock = task.clock
    return True


def _is_a_ranks(future: Any, callback: object) -> bool:
    task = current_task()
    if task is not None and task.port.facts.turns is not None and not take_turn_at(future, "then", Access.READ):
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename == torch.futures.__file__:
            frame = frame.f_back
        if frame is not None and not is_ours(frame.f_code.co_filename):
            task.port.facts.turns.does("adds a callback to a future", frame)
    return callable(callback) and task is not None  # torch refuses what cannot be called


def _then(self: Any, callback: Callable[[Any], Any]) -> Any:
    if not _is_a_ranks(self, callback):
        return _real_then(self, callback)
    chained = _real_then(self, _on_streams(callback, gives=True))
    if self in plain_futures:
        plain_futures[chained] = plain_futures[self]
    made_of(chained, (self,))
    return chained


def _add_done_callback(self: Any, callback: Callable[[Any], Any]) -> None:
    _real_add(self, _on_streams(callback, gives=False) if _is_a_ranks(self, callback) else callback)


def _init(self: Any, *, devices: list[int | str | torch.device] | None = None) -> None:
    _real_init(self, devices=devices)
    if devices:
        self._distsim_devices = [torch.device(device) for device in devices]
    task, maker = current_task(), sys._getframe(1)
    turns = None if task is None else task.port.facts.turns
    if task is not None and turns is not None and not is_ours(maker.f_code.co_filename) and asking_line(maker):
        plain_futures[self] = _PlainFuture(("future", name_of(task), turns.number("future", name_of(task))))


def _set_result(self: Any, result: object) -> None:
    task = current_task()
    devices = getattr(self, "_distsim_devices", ())
    if task is not None and devices and task.process.accelerators is not None:
        _complete(task, result, [task.process.accelerators[device.index or 0] for device in devices])
    take_turn_at(self, "set_result", Access.WRITE)
    _real_set(self, result)


def callback_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for futures whose values are on GPUs."""
    return [
        (_Base, "then", _then),
        (_Base, "add_done_callback", _add_done_callback),
        (_Base, "set_result", _set_result),
        (Future, "__init__", _init),
    ]
