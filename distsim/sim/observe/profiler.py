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
from distsim.sim.isolation.process import current_process, current_task

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Recorder", "profiler_patches"]

_MAIN_THREAD, _BACKEND_THREAD = 1, 2
"""Collectives run beside the program: they have a line of their own in the trace."""

_DISPATCHED = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_coalesced": "allgather_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
}
"""The operator `c10d::...` through which torch's dispatcher leads each call, on the caller's own thread."""

_TITLES = {
    "gloo": {
        "all_reduce_coalesced": "all_reduce",
        "all_gather_coalesced": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "reduce_scatter": "all_reduce",
        "reduce_scatter_tensor": "all_reduce",
        "reduce_scatter_tensor_coalesced": "all_reduce",
        "all_to_all_single": "all_to_all",
    },
    "nccl": {
        "all_gather_into_tensor": "_all_gather_base",
        "reduce_scatter_tensor": "_reduce_scatter_base",
        "all_to_all_single": "all_to_all",
    },
}
"""What a backend calls the work that it does (ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp), where not as torch does."""

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

    def __init__(
        self, number: int, name: str, start_s: float, end_s: float, *, thread: int = _MAIN_THREAD, **answers: Any
    ) -> None:
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
        self._slices: list[tuple[str, float, float, dict[str, Any]]] = []
        self._works: list[tuple[str, CallRecord, list[Any]]] = []
        """What backends do beside the program: name, call, shapes."""
        self.labels: list[tuple[str, float]] = []

    def operator(self, name: str, start_s: float, seconds: float, inputs: Any) -> None:
        self._slice(name, start_s, start_s + seconds, [_shape(value) for value in inputs])

    def label(self, name: str, start_s: float, end_s: float) -> None:
        self._slice(name, start_s, end_s, [], is_user_annotation=True, activity_type="user_annotation", scope=7)

    def call(self, record: CallRecord, backend: str, sparse: bool) -> None:
        """A call of torch.distributed begins: torch shows an operator of its own and the work of the backend."""
        name = _DISPATCHED.get(record.op)
        if name is None:
            return
        title = _TITLES.get(backend, {}).get(record.op, record.op)
        if backend == "gloo" and sparse:
            title = "sparse_all_reduce"
        elif record.op == "recv" and record.peer is None:
            name, title = "recv_any_source_", "recvAnySource"
        elif backend == "nccl" and record.is_p2p:
            me, other = map(record.group.ranks.index, (record.rank, record.peer))
            title = f"send {me}->{other}" if record.op == "send" else f"recv {me}<-{other}"
        overhead_s = self._process.world.cluster.cpu.op_overhead_s
        self._slice(f"c10d::{name}", record.issued_s - overhead_s, record.issued_s, _argument_shapes(name, record))
        if record.op == "monitored_barrier":  # gloo makes it of messages of one byte with rank 0
            peers = len(record.group.ranks) - 1 if record.rank == record.group.ranks[0] else 1
            steps = ["recv", "send"] if record.rank == record.group.ranks[0] else ["send", "recv"]
            works = [(step, [[1]]) for step in steps for _ in range(peers)]
        elif backend == "gloo" and record.op == "reduce_scatter":  # one reduction for each of its inputs
            works = [(title, [list(shape)]) for shape in record.input_shapes]
        else:
            shapes = record.output_shapes if record.op == "recv" else record.input_shapes
            works = [(title, [list(shape) for shape in shapes])]
        self._works += [(f"{backend}:{title}", record, shapes) for title, shapes in works]

    def _slice(self, name: str, start_s: float, end_s: float, shapes: list[Any], **answers: Any) -> None:
        if self._with_shapes:
            answers["shapes"] = shapes
        self._slices.append((name, start_s, end_s, answers))

    def result(self, end_s: float) -> _Result:
        for name, record, shapes in self._works:
            if record.started_s is not None or record.completed_s is not None:
                done_s = end_s if record.completed_s is None else record.completed_s
                thread = _MAIN_THREAD if record.is_p2p or record.op == "monitored_barrier" else _BACKEND_THREAD
                facts = {"is_async": True, "is_user_annotation": True, "activity_type": "user_annotation", "scope": 7}
                self._slice(name, record.issued_s, done_s, shapes, thread=thread, **facts)
        in_order = sorted(self._slices, key=lambda s: (s[1], -s[2], not s[3].get("is_user_annotation")))
        events = [
            _Event(number, name, begin, end, **answers)
            for number, (name, begin, end, answers) in enumerate(in_order, 1)
        ]
        return _Result(events, self._start_s, self._process.rank)


def _shape(value: Any) -> list[int]:
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def _argument_shapes(name: str, record: CallRecord) -> list[list[int]]:
    """Of the operator's arguments: of those that are one tensor, the shape; of all others nothing."""
    packet = getattr(torch.ops.c10d, name)
    overload = getattr(packet, packet.overloads()[0])
    shapes: list[list[int]] = [[] for _ in overload._schema.arguments]
    if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        shapes[0], shapes[1] = list(record.output_shapes[0]), list(record.input_shapes[0])
    elif name == "barrier":  # a tensor that only says which device
        shapes[0] = [1]
    elif name == "monitored_barrier_":
        shapes[0] = [0]
    return shapes


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
    real_config = torch_profiler.profile.config
    reducer = torch._C._distributed_c10d.Reducer
    real_prepare_backward = reducer.prepare_for_backward

    @functools.wraps(real_config)
    def config(self: Any, *args: Any, **kwargs: Any) -> Any:
        process = current_process()
        if process is not None:  # the C++ object made here does not tell
            process.notes.profile_with_shapes = bool(self.record_shapes)
        return real_config(self, *args, **kwargs)

    @functools.wraps(real_prepare_backward)
    def prepare_for_backward(self: Any, outputs: Any) -> None:
        process, task = current_process(), current_task()
        if outputs and process is not None and task is not None and process.recorder is not None:
            now_s = task.now_s()
            process.recorder.operator("torch.distributed.ddp.reducer::search_unused_parameters", now_s, 0.0, ())
        real_prepare_backward(self, outputs)

    def prepare(*args: Any, **kwargs: Any) -> None:
        if current_task() is None:
            real_prepare(*args, **kwargs)

    def enable(*args: Any, **kwargs: Any) -> None:
        task = current_task()
        if task is None:
            real_enable(*args, **kwargs)
        else:
            if task.process.accelerators is not None:
                task.process.world.note(
                    "torch.profiler saw what the host did, not the kernels: --trace FILE has the streams of every GPU"
                )
            with_shapes = task.process.notes.profile_with_shapes
            task.process.recorder = Recorder(task.process, task.now_s(), with_shapes)

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
    def script(obj: Any, optimize: None = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        """The compiler reads the source of `record_function`: for that time it is torch's own."""
        args = (obj, optimize, _frames_up + 1, *args)  # names in a class are looked up in the caller's frame
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
        (torch_profiler.profile, "config", config),
        (reducer, "prepare_for_backward", prepare_for_backward),
        (label, "__enter__", enter),
        (label, "__exit__", leave),
    ]
