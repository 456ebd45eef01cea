"""`torch.profiler` inside a rank: its operators, labels and collectives, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.profiler as torch_profiler
from torch.autograd import DeviceType, ProfilerActivity
from torch.profiler import ExecutionTraceObserver

from distsim.errors import NotSimulated
from distsim.network.critical_path import operator_name
from distsim.sim.c10d.group_api import OPERATORS
from distsim.sim.device.timeline import Comm, Kernel
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks, patch_for_ranks
from distsim.sim.isolation.process import RankTask, SimProcess, current_task
from distsim.sim.observe.execution_trace import TITLES, ExecutionTrace
from distsim.torch_compat import groups as group_names

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord
    from distsim.sim.device.gpu import Device
    from distsim.sim.device.timeline import StreamTimeline
    from distsim.sim.isolation.modules.patch_table import Patch

# -- What torch's own profiler asks for of C++: events, and the trace that they are written to.


MAIN_THREAD, BACKEND_THREAD = 1, 2
"""Threads in the trace: collectives run beside the program, so they have a line of their own."""

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
"""Attributes of a Kineto event for a plain operator on the CPU."""


class ProfilerEvent:
    """One slice, with the interface of a Kineto event."""

    def __init__(
        self, number: int, name: str, start_s: float, end_s: float, *, thread: int = MAIN_THREAD, **answers: Any
    ) -> None:
        start_ns = round(start_s * 1e9)
        end_ns = round(end_s * 1e9)
        own: dict[str, Any] = {"name": name, "correlation_id": number, "start_ns": start_ns, "end_ns": end_ns}
        own |= {"duration_ns": end_ns - start_ns, "start_thread_id": thread, "end_thread_id": thread}
        own["external_id"] = answers.get("linked_correlation_id") or number  # torch 2.15 links no event that has none
        self._answers = {**_ANSWERS, **own, **answers}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name not in self._answers and not hasattr(group_names.KINETO_EVENT.get(), name)):
            raise AttributeError(name)
        answer = self._answers.get(name)  # None: a question that only a newer torch asks
        return lambda: answer


def _arguments(event: ProfilerEvent) -> dict[str, Any]:
    """Return the arguments of an event in a trace."""
    if event.device_type() == DeviceType.CUDA:
        where = {"device": event.device_index(), "stream": event.device_resource_id()}
        return {**where, "External id": event.linked_correlation_id(), "correlation": event.correlation_id()}
    fields: dict[str, Any] = {"External id": event.correlation_id()} if event.activity_type() == "cpu_op" else {}
    return fields | ({"Input Dims": event.shapes()} if event.shapes() else {})


class ProfileResult:
    """Replacement for C++'s _ProfilerResult."""

    def __init__(self, events: list[ProfilerEvent], start_s: float, rank: int) -> None:
        self._events = events
        self._start_s = start_s
        self._rank = rank

    def events(self) -> list[ProfilerEvent]:
        return self._events

    def trace_start_ns(self) -> int:
        return round(self._start_s * 1e9)

    def save(self, path: str) -> None:
        """Write a trace for Perfetto."""
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


# -- `torch.profiler` inside a rank: its operators, labels and collectives, in virtual time.
#
# torch's own profiler classes run unchanged; what the C++ profiler would have collected comes from the
# simulation. The real one measures the laptop, and is made for one thread that profiles at a time.

_prepare_for_backward = group_names.PREPARE_FOR_BACKWARD.get()
_profiler_enabled = group_names.PROFILES.get()
_supported_activities = group_names.SUPPORTED_ACTIVITIES.get()

_MEMCPY = {"h2d": "Memcpy HtoD", "d2h": "Memcpy DtoH"}
"""Kineto's names of copies between host and device, by kind of kernel."""
_NCCL = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "all_gather_into_tensor": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "reduce_scatter_tensor": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "barrier": "AllReduce",
}
"""NCCL's names of kernels (src/device/generate.py), without algorithm and protocol; all others are SendRecv."""


class ProfileRecorder:
    """Records one process between the start and the end of a profile."""

    def __init__(self, process: SimProcess, start_s: float, with_shapes: bool, activities: Any) -> None:
        self._process = process
        self._start_s = start_s
        self._with_shapes = with_shapes
        self._sees_host = ProfilerActivity.CPU in activities
        self._sees_gpus = ProfilerActivity.CUDA in activities
        self._slices: list[tuple[str, float, float, dict[str, Any], Any]] = []
        """Name, start, end, arguments, and launched kernel or label of each slice."""
        self._launched: list[tuple[Device, StreamTimeline, Kernel | Comm]] = []
        self.arguments: Any = ()
        """Arguments of the operator that launches next."""
        self._works: list[tuple[str, CallRecord, list[Any]]] = []
        """Work of backends in the background: name, call, shapes."""
        self.labels: list[tuple[str, float]] = []

    def operator(self, name: str, start_s: float, seconds: float, inputs: Any) -> None:
        self._slice(name, start_s, start_s + seconds, [_shape(value) for value in inputs])

    def launched(self, device: Device, stream: StreamTimeline, item: Kernel | Comm) -> None:
        """Record that an operator or a call has put *item* into *stream*."""
        if self._sees_gpus:
            self._launched.append((device, stream, item))
        if isinstance(item, Kernel):
            end_s = item.launched_s - device.model.launch_s
            shapes, self.arguments = [_shape(value) for value in self.arguments], ()
            self._slice(f"aten::{operator_name(item.name)}", end_s - device.host.operator_s, end_s, shapes, item)

    def _kernels(self, numbers: dict[int, int]) -> list[ProfilerEvent]:
        """Return the kernels of the GPUs. *numbers* maps slices to the launching operators."""
        events: list[ProfilerEvent] = []
        for device, stream, item in self._launched:
            device.timeline.catch_up()
            if item.begun_s is None or item.ended_s is None:
                continue  # torch, too, loses what has not ended when the profile does
            if isinstance(item, Comm):
                by: Any = item.records[0]
                title = _NCCL.get(by.op, "SendRecv")
                name, kind = f"ncclDevKernel_{title}", "kernel"
            else:
                by, copied = item, _MEMCPY.get(item.kind)
                name = copied or f"{operator_name(item.name)}_kernel"
                kind = "gpu_memcpy" if copied else "kernel"
            facts = {"device_type": DeviceType.CUDA, "device_index": device.index, "activity_type": kind}
            facts |= {"device_resource_id": stream.number, "linked_correlation_id": numbers.get(id(by), 0)}
            number = len(numbers) + len(events) + 1_000_000
            events.append(ProfilerEvent(number, name, item.begun_s, item.ended_s, thread=stream.number, **facts))
        return events

    def label(self, name: str, start_s: float, end_s: float) -> None:
        self._slice(name, start_s, end_s, [], is_user_annotation=True, activity_type="user_annotation", scope=7)

    def call(self, record: CallRecord, backend: str, sparse: bool) -> None:
        """Record the start of a call of torch.distributed: torch shows an operator of its own and the backend's
        work.
        """
        name = OPERATORS.get(record.op)
        if name is None:
            return
        title = TITLES.get(backend, {}).get(record.op, record.op)
        if backend == "gloo" and sparse:
            title = "sparse_all_reduce"
        elif record.op == "recv" and record.peer is None:
            name, title = "recv_any_source_", "recvAnySource"
        elif backend == "nccl" and record.is_p2p:
            me, other = map(record.group.ranks.index, (record.rank, record.peer))
            title = f"send {me}->{other}" if record.op == "send" else f"recv {me}<-{other}"
        overhead_s = self._process.port.facts.cluster.cpu.op_overhead_s
        begin_s = record.issued_s - overhead_s
        self._slice(f"c10d::{name}", begin_s, record.issued_s, _argument_shapes(name, record), record)
        if record.op == "monitored_barrier":  # gloo makes it of messages of one byte with rank 0
            peers = len(record.group.ranks) - 1 if record.rank == record.group.ranks[0] else 1
            steps = ["recv", "send"] if record.rank == record.group.ranks[0] else ["send", "recv"]
            works = [(step, [[1]]) for step in steps for _ in range(peers)]
        elif backend == "gloo" and record.op == "reduce_scatter":  # one reduction for each of its inputs
            works = [(title, [list(shape)]) for shape in record.input_shapes]
        else:
            moved = record.output_shapes if record.op == "recv" else record.input_shapes
            works = [(title, [list(shape) for shape in moved])]
        self._works += [(f"{backend}:{title}", record, shapes) for title, shapes in works]

    def _slice(
        self, name: str, start_s: float, end_s: float, shapes: list[Any], launched: Any = None, **answers: Any
    ) -> None:
        if self._with_shapes:
            answers["shapes"] = shapes
        if self._sees_host:
            self._slices.append((name, start_s, end_s, answers, launched))

    def result(self, end_s: float) -> ProfileResult:
        for name, record, shapes in self._works:
            if record.started_s is not None or record.completed_s is not None:
                done_s = end_s if record.completed_s is None else record.completed_s
                thread = MAIN_THREAD if record.is_p2p or record.op == "monitored_barrier" else BACKEND_THREAD
                facts = {"is_async": True, "is_user_annotation": True, "activity_type": "user_annotation", "scope": 7}
                self._slice(name, record.issued_s, done_s, shapes, thread=thread, **facts)
        in_order = sorted(self._slices, key=lambda s: (s[1], -s[2], not s[3].get("is_user_annotation")))
        events = [
            ProfilerEvent(number, name, begin, end, **answers)
            for number, (name, begin, end, answers, _) in enumerate(in_order, 1)
        ]
        numbers = {id(piece[4]): number for number, piece in enumerate(in_order, 1) if piece[4] is not None}
        return ProfileResult(events + self._kernels(numbers), self._start_s, self._process.rank)


def _shape(value: Any) -> list[int]:
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def _argument_shapes(name: str, record: CallRecord) -> list[list[int]]:
    """Return the shapes of the operator's arguments that are one tensor, and nothing for the others."""
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


_NOT_RECORDED = {
    "with_stack": "export_stacks writes an empty file, and traces have no Python frames",
    "profile_memory": "tables have no CUDA Mem; see torch.cuda.memory_stats(), and the report for the peak",
}
"""Options of a profile that are accepted but not recorded, with the consequence."""


def profiler_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for the C++ profiler's functions."""
    return [*_setting_patches(), *_recording_patches(), *_label_patches()]


def _setting_patches() -> list[Patch]:
    """Return the patches of settings that a profile can ask for."""
    real_config = torch_profiler.profile.config

    def config(task: RankTask, self: Any, *args: Any, **kwargs: Any) -> Any:
        task.process.notes.profile_with_shapes = bool(self.record_shapes)  # the C++ object made here does not tell
        for setting, lacks in _NOT_RECORDED.items():
            if getattr(self, setting, False):
                task.port.note(f"torch.profiler: {setting}=True is not simulated: {lacks}")
        return real_config(self, *args, **kwargs)

    def supported(task: RankTask) -> Any:
        cpu_and_gpus = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        return _supported_activities() if task.process.accelerators is None else cpu_and_gpus

    return [
        patch_for_ranks(torch_profiler.profile, "config", config),
        *_execution_trace_patches(),
        *name_for_ranks(group_names.SUPPORTED_ACTIVITIES, supported),
        *name_for_ranks(group_names.SUPPORTED_ACTIVITIES_HERE, supported),
    ]


def _execution_trace_patches() -> list[Patch]:
    """Return patches that make an ExecutionTraceObserver in a simulated rank write a file of that rank."""
    kind = ExecutionTraceObserver

    def register(task: RankTask, self: Any, output_file_path: str) -> Any:
        if task.process.observers.execution_trace is None:
            self.output_file_path = output_file_path
            task.process.observers.execution_trace = ExecutionTrace(output_file_path, self)
        return self

    def unregister(task: RankTask, self: Any) -> None:
        trace = task.process.observers.execution_trace
        if trace is not None and trace.observer is self:
            trace.write()
            task.process.observers.execution_trace = None

    def start(task: RankTask, self: Any) -> None:
        if task.process.observers.execution_trace is not None:
            task.process.observers.execution_trace.start()

    def stop(task: RankTask, self: Any) -> None:
        if task.process.observers.execution_trace is not None:
            task.process.observers.execution_trace.is_active = False

    def registered(task: RankTask, self: Any) -> bool:
        return task.process.observers.execution_trace is not None

    return [
        patch_for_ranks(kind, "register_callback", register),
        patch_for_ranks(kind, "unregister_callback", unregister),
        patch_for_ranks(kind, "start", start),
        patch_for_ranks(kind, "stop", stop),
        (kind, "is_registered", property(for_ranks(kind.is_registered.fget, registered))),
    ]


def _recording_patches() -> list[Patch]:
    """Return a profile's beginning and end."""

    def enable(task: RankTask, config: Any, activities: Any, *args: Any, **kwargs: Any) -> None:
        with_shapes = task.process.notes.profile_with_shapes
        task.process.observers.recorder = ProfileRecorder(task.process, task.now_s(), with_shapes, activities)
        if ProfilerActivity.CUDA in activities:
            task.process.port.note(
                "torch.profiler: a kernel has its operator's name; operators that launch none (views) are left out"
            )

    def disable(task: RankTask) -> Any:
        recorder, task.process.observers.recorder = task.process.observers.recorder, None
        return None if recorder is None else recorder.result(task.now_s())

    return [
        *name_for_ranks(group_names.PREPARE_PROFILER, lambda *_, **__: None),
        *name_for_ranks(group_names.ENABLE_PROFILER, enable),
        *name_for_ranks(group_names.DISABLE_PROFILER, disable),
        *name_for_ranks(group_names.ADD_METADATA_JSON, lambda *_: None),
    ]


def _label_patches() -> list[Patch]:
    """Return the labels in a profile: `record_function`, and the search of DDP for unused parameters."""
    label = torch_profiler.record_function
    real_enter, real_exit = label.__enter__, label.__exit__
    real_script = torch.jit.script

    def prepare_for_backward(task: RankTask, self: Any, outputs: Any) -> None:
        recorder = task.process.observers.recorder
        if outputs and recorder is not None:
            search = "torch.distributed.ddp.reducer::search_unused_parameters"
            recorder.operator(search, task.now_s(), 0.0, ())
        _prepare_for_backward(self, outputs)

    def enter(self: Any) -> Any:
        task = current_task()
        if task is None or _profiler_enabled():  # the legacy profiler: C++'s own, and a thread's
            return real_enter(self)
        if task.process.observers.recorder is not None:
            task.process.observers.recorder.labels.append((self.name, task.now_s()))
        if task.process.observers.execution_trace is not None:
            task.process.observers.execution_trace.enter(self.name)
        self.record = None
        return self

    def leave(self: Any, *exc: Any) -> None:
        task = current_task()
        if task is None or self.record is not None:
            real_exit(self, *exc)
            return
        recorder, trace = task.process.observers.recorder, task.process.observers.execution_trace
        if trace is not None:
            trace.leave()
        if recorder is not None and recorder.labels and recorder.labels[-1][0] == self.name:
            name, start_s = recorder.labels.pop()
            recorder.label(name, start_s, task.now_s())

    def script(obj: Any, optimize: None = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Compile with torch's own `record_function`, because the compiler reads its source."""
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
        *name_for_ranks(group_names.PREPARE_FOR_BACKWARD, prepare_for_backward),
        (label, "__enter__", enter),
        (label, "__exit__", leave),
    ]
