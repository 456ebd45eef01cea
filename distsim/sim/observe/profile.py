"""What torch's own profiler asks for of C++: events, and the trace that they are written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType

from distsim.errors import NotSimulated
from distsim.torch_compat.works import KINETO_EVENT

__all__ = ["BACKEND_THREAD", "MAIN_THREAD", "Event", "Result"]

_KinetoEvent = KINETO_EVENT.get()

MAIN_THREAD, BACKEND_THREAD = 1, 2
"""Collectives run beside the program: they have a line of their own in the trace."""

_STREAMS = 1_000
"""Number of the line of a GPU's first stream in a trace."""

_ANSWERS: dict[str, Any] = {
    "device_type": DeviceType.CPU,
    "device_index": 0,
    "device_resource_id": 0,
    "fwd_thread_id": 0,
    "sequence_nr": -1,
    "linked_correlation_id": 0,
    "overload_name": "",
    "activity_type": "cpu_op",
    "metadata_json": "",
    "nbytes": 0,
    "flops": 0,
    "scope": 0,
    "is_async": False,
    "is_hidden_event": False,
    "is_user_annotation": False,
    "is_python_function": False,
    "flow_id": 0,
    "flow_type": 0,
    "flow_start": False,
    "external_id": 0,
    "python_id": -1,
    "python_parent_id": -1,
    "python_module_id": -1,
    "privateuse1_elapsed_us": -1,
    "cuda_elapsed_us": -1,
    "shapes": [],
    "structured_input_shapes": [],
    "structured_input_strides": [],
    "dtypes": [],
    "concrete_inputs": [],
    "kwinputs": {},
    "extra_meta": {},
    "stack": [],
    "typed_metadata": {},
}
"""What a Kineto event of a plain operator on the CPU answers."""


class Event:
    """One slice, with the questions torch asks of a Kineto event."""

    def __init__(
        self, number: int, name: str, start_s: float, end_s: float, *, thread: int = MAIN_THREAD, **answers: Any
    ) -> None:
        start_ns = round(start_s * 1e9)
        end_ns = round(end_s * 1e9)
        own: dict[str, Any] = {"name": name, "correlation_id": number, "start_ns": start_ns, "end_ns": end_ns}
        own |= {"duration_ns": end_ns - start_ns, "start_thread_id": thread, "end_thread_id": thread}
        self._answers = {**_ANSWERS, **own, **answers}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name not in self._answers and not hasattr(_KinetoEvent, name)):
            raise AttributeError(name)
        answer = self._answers.get(name)  # None: a question that only a newer torch asks
        return lambda: answer


def _arguments(event: Event) -> dict[str, Any]:
    """What a trace says of an event besides its time."""
    if event.device_type() == DeviceType.CUDA:
        where = {"device": event.device_index(), "stream": event.device_resource_id()}
        return {**where, "External id": event.linked_correlation_id(), "correlation": event.correlation_id()}
    told: dict[str, Any] = {"External id": event.correlation_id()} if event.activity_type() == "cpu_op" else {}
    return told | ({"Input Dims": event.shapes()} if event.shapes() else {})


class Result:
    """Stands for C++'s _ProfilerResult."""

    def __init__(self, events: list[Event], start_s: float, rank: int) -> None:
        self._events = events
        self._start_s = start_s
        self._rank = rank

    def events(self) -> list[Event]:
        return self._events

    def trace_start_ns(self) -> int:
        return round(self._start_s * 1e9)

    def save(self, path: str) -> None:
        """A trace that Perfetto opens."""
        slices = [
            {
                "ph": "X",
                "cat": event.activity_type(),
                "name": event.name(),
                "pid": self._rank,
                "tid": event.start_thread_id() + (_STREAMS if event.device_type() == DeviceType.CUDA else 0),
                "ts": event.start_ns() / 1e3,
                "dur": event.duration_ns() / 1e3,
                "args": _arguments(event),
            }
            for event in self._events
        ]
        streams = {e.device_resource_id() for e in self._events if e.device_type() == DeviceType.CUDA}
        slices += [
            {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": _STREAMS + n, "args": {"name": f"stream {n}"}}
            for n in sorted(streams)
        ]
        document = {"schemaVersion": 1, "distributedInfo": {"rank": self._rank}, "traceEvents": slices}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSimulated(f"torch.profiler's {name}", "key_averages, events and export_chrome_trace are")
