"""The events that autograd records and waits for in C++, where backward goes from one stream to another.

The device guard's functions for events (c10/core/impl/DeviceGuardImplInterface.h) in Python. C++ calls them in the
rank's own thread, from torch/csrc/autograd/input_buffer.cpp and engine.cpp; an exception cannot pass through them.
"""

from __future__ import annotations

import ctypes
import itertools

from distsim.sim.device.timeline.items import Mark
from distsim.sim.isolation.process import current_task

__all__ = ["EVENT_FUNCTIONS"]

_DESTROY, _RECORD, _BLOCK = 11, 12, 13
"""Their places in the table of functions."""

_Word = ctypes.c_void_p


class _Stream(ctypes.Structure):
    """c10::Stream."""

    _fields_ = (("device_type", ctypes.c_int8), ("device_index", ctypes.c_int8), ("stream_id", ctypes.c_int64))


_marks: dict[int, Mark] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, _Word, ctypes.POINTER(_Word), ctypes.POINTER(_Stream), ctypes.c_int8, ctypes.c_int32)
def _record(_: int, event: ctypes._Pointer[_Word], stream: ctypes._Pointer[_Stream], index: int, flag: int) -> None:
    task = current_task()
    if task is None or task.process.accelerators is None:
        return
    device = task.process.accelerators[stream[0].device_index]
    number = event[0] or next(_numbers)
    _marks[number] = device.timeline.mark(device.streams[stream[0].stream_id], task.now_s())
    event[0] = number


@ctypes.CFUNCTYPE(None, _Word, _Word, ctypes.POINTER(_Stream))
def _block(_: int, event: int | None, stream: ctypes._Pointer[_Stream]) -> None:
    task, mark = current_task(), _marks.get(event or 0)
    if task is None or mark is None:
        return
    device = task.process.accelerators[stream[0].device_index]
    device.wait_for(device.streams[stream[0].stream_id], mark, task.now_s())


@ctypes.CFUNCTYPE(None, _Word, _Word, ctypes.c_int8)
def _destroy(_: int, event: int | None, index: int) -> None:
    _marks.pop(event or 0, None)


EVENT_FUNCTIONS = {_DESTROY: _destroy, _RECORD: _record, _BLOCK: _block}
"""By their places in the guard's table of functions."""
