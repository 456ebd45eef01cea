"""`torch.profiler` inside a rank: its operators, labels and collectives, in virtual time.

torch's own profiler classes run unchanged; what the C++ profiler would have collected comes from the
simulation. The real one measures the laptop, and is made for one thread that profiles at a time.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.profiler as torch_profiler
from torch.autograd import DeviceType

from distsim.errors import NotSimulated
from distsim.sim.task import current_process, current_task

if TYPE_CHECKING:
    from distsim.sim.process import SimProcess

__all__ = ["Recorder", "profiler_patches"]

_COLLECTIVES_THREAD = 2
"""Calls run beside the program: they have a line of their own in the trace."""

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
}
"""What a Kineto event of a plain operator on the CPU answers."""


class _Event:
    """One slice, with the questions torch asks of a Kineto event."""

    def __init__(self, number: int, name: str, start_s: float, end_s: float, thread: int, **answers: Any) -> None:
        start_ns = round(start_s * 1e9)
        end_ns = round(end_s * 1e9)
        own: dict[str, Any] = {"name": name, "correlation_id": number, "start_ns": start_ns, "end_ns": end_ns}
        own |= {"duration_ns": end_ns - start_ns, "start_thread_id": thread, "end_thread_id": thread}
        self._answers = {**_ANSWERS, **own, **answers}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._answers:
            raise AttributeError(name)
        answer = self._answers[name]
        return lambda: answer


class Recorder:
    """What one process does between the start and the end of a profile."""

    def __init__(self, process: SimProcess, start_s: float, with_shapes: bool) -> None:
        self._process = process
        self._start_s = start_s
        self._with_shapes = with_shapes
        self._first_record = len(process.records)
        self._slices: list[tuple[str, float, float, dict[str, Any]]] = []
        self.labels: list[tuple[str, float]] = []

    def operator(self, name: str, start_s: float, seconds: float, inputs: Any) -> None:
        answers: dict[str, Any] = {}
        if self._with_shapes:
            answers["shapes"] = [list(x.shape) if isinstance(x, torch.Tensor) else [] for x in inputs]
        self._slices.append((name, start_s, start_s + seconds, answers))

    def label(self, name: str, start_s: float, end_s: float) -> None:
        self._slices.append(
            (name, start_s, end_s, {"is_user_annotation": True, "activity_type": "user_annotation", "scope": 7})
        )

    def result(self, end_s: float) -> _Result:
        events = [
            _Event(number, name, begin, end, 1, **answers)
            for number, (name, begin, end, answers) in enumerate(
                sorted(self._slices, key=lambda s: (s[1], -s[2], not s[3].get("is_user_annotation"))), 1
            )
        ]
        for record in self._process.records[self._first_record :]:
            if record.started_s is not None:
                name = f"{self._backend()}:{record.op}"
                shapes = [list(shape) for shape in record.input_shapes or record.output_shapes]
                done_s = end_s if record.completed_s is None else record.completed_s
                events.append(
                    _Event(len(events) + 1, name, record.issued_s, done_s, _COLLECTIVES_THREAD, shapes=shapes)
                )
        return _Result(events, self._start_s, self._process.rank)

    def _backend(self) -> str:
        groups = self._process.group_objects
        return str(groups[0].name()) if groups else "gloo"


class _Result:
    """Stands for C++'s _ProfilerResult."""

    def __init__(self, events: list[_Event], start_s: float, rank: int) -> None:
        self._events = events
        self._start_s = start_s
        self._rank = rank

    def events(self) -> list[_Event]:
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
                "tid": event.start_thread_id(),
                "ts": event.start_ns() / 1e3,
                "dur": event.duration_ns() / 1e3,
                "args": {"Input Dims": event.shapes()} if event.shapes() else {},
            }
            for event in self._events
        ]
        document = {"schemaVersion": 1, "distributedInfo": {"rank": self._rank}, "traceEvents": slices}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSimulated(f"torch.profiler's {name}", "key_averages, events and export_chrome_trace are")


def profiler_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of the C++ profiler's entrances."""
    real_prepare, real_enable = torch_profiler._prepare_profiler, torch_profiler._enable_profiler
    real_disable, label = torch_profiler._disable_profiler, torch_profiler.record_function
    real_enter, real_exit = label.__enter__, label.__exit__
    real_metadata, real_script = torch.autograd._add_metadata_json, torch.jit.script

    def prepare(*args: Any, **kwargs: Any) -> None:
        if current_task() is None:
            real_prepare(*args, **kwargs)

    def enable(*args: Any, **kwargs: Any) -> None:
        task = current_task()
        if task is None:
            real_enable(*args, **kwargs)
        else:
            task.process.recorder = Recorder(task.process, task.now_s(), True)

    def disable() -> Any:
        task = current_task()
        if task is None:
            return real_disable()
        recorder, task.process.recorder = task.process.recorder, None
        return None if recorder is None else recorder.result(task.now_s())

    def enter(self: Any) -> Any:
        task = current_task()
        if task is None:
            return real_enter(self)
        if task.process.recorder is not None:
            task.process.recorder.labels.append((self.name, task.now_s()))
        self.record = None
        return self

    def leave(self: Any, *exc: Any) -> None:
        task = current_task()
        if task is None:
            real_exit(self, *exc)
            return
        recorder = task.process.recorder
        if recorder is not None and recorder.labels and recorder.labels[-1][0] == self.name:
            name, start_s = recorder.labels.pop()
            recorder.label(name, start_s, task.now_s())

    def metadata(key: str, value: str) -> None:
        if current_process() is None:
            real_metadata(key, value)

    @functools.wraps(torch.jit.script)
    def script(*args: Any, **kwargs: Any) -> Any:
        """The compiler reads the source of `record_function`: for that time it is torch's own."""
        if current_task() is None:
            return real_script(*args, **kwargs)
        label.__enter__, label.__exit__ = real_enter, real_exit
        try:
            return real_script(*args, **kwargs)
        finally:
            label.__enter__, label.__exit__ = enter, leave

    return [
        (torch.jit, "script", script),
        (torch_profiler, "_prepare_profiler", prepare),
        (torch_profiler, "_enable_profiler", enable),
        (torch_profiler, "_disable_profiler", disable),
        (torch.autograd, "_add_metadata_json", metadata),
        (label, "__enter__", enter),
        (label, "__exit__", leave),
    ]
