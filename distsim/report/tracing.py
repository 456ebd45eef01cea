"""The trace: what every rank did when, in the format of PyTorch's profiler (Kineto), for Perfetto and others.

One file holds all ranks (Perfetto, chrome://tracing); a folder gets one file for each rank, as Holistic
Trace Analysis wants them. A rank is a process; its threads and its communication streams are
tracks. A collective's slice begins where the rank called it, as a NCCL kernel does, and the part
before the last member came is a slice of its own inside ("waits for ..."). An arrow leads from the
rank that came last to the one that waited longest, and from a send to its receive. Link utilisation
is drawn as counters of a second kind of process. Times are microseconds of virtual time.

A kernel of a simulated GPU lies where it ran, on its stream, and its operator on the host's track, where it was
launched. Holistic Trace Analysis takes what has a stream for the device's work and tells communication by its name, so
its temporal breakdown (idle, compute, the rest) is that of the report: host-bound, compute, exposed and bubble.

Names of collectives and arguments are those of torch/csrc/distributed/c10d/ParamCommsUtils.hpp and Kineto's
`NcclMetadata`; those of kernels, of NCCL's src/device/generate.py, which builds one kernel a function, named after
RING_LL whatever algorithm and protocol then run inside it.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.debug.messages import call_text
from distsim.debug.records import CallRecord
from distsim.debug.records.arguments import FIELDS
from distsim.errors import UsageError
from distsim.text.output_files import open_output

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import GpuTrack, KernelSlice
    from distsim.sim.outcome import Outcome

_COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather": "allgather",
    "all_gather_into_tensor": "_allgather_base",
    "all_gather_coalesced": "allgather_coalesced",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}
_OPS = {
    "AllReduce": ("all_reduce", "all_reduce_coalesced", "barrier"),
    "Broadcast": ("broadcast",),
    "Reduce": ("reduce",),
    "AllGather": ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced"),
    "ReduceScatter": ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    "SendRecv": ("all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv"),
}
"""The operations of each function of NCCL."""
_KERNELS = {op: function for function, ops in _OPS.items() for op in ops}
_REDUCING = {"AllReduce", "Reduce", "ReduceScatter"}
_REDUCE_OPS = {"SUM": "Sum", "AVG": "Sum", "PRODUCT": "Prod", "MIN": "MinMax", "MAX": "MinMax"}
_REDUCE_OPS["PREMUL_SUM"] = "PreMulSum"
_KERNEL_DTYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "u8",
    "bool": "u8",
}
_SCALAR_TYPES = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def call_name(record: CallRecord) -> str:
    """Return the name of the call on the host."""
    return f"c10d::{record.op}"


def is_kernel(record: CallRecord) -> bool:
    """Return whether the call moves data on a device's stream, unlike new_group."""
    return record.op in _KERNELS


def kernel_name(record: CallRecord) -> str:
    """Return the name of a call's kernel, such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    function = _KERNELS[record.op]
    if function == "SendRecv":
        return "ncclDevKernel_SendRecv"
    if function not in _REDUCING:
        return f"ncclDevKernel_{function}_RING_LL"
    reduce_op = _REDUCE_OPS.get(record.reduce_op or "SUM", "Sum")
    dtype = _KERNEL_DTYPES.get(record.dtypes[0], "i8") if record.dtypes else "i8"
    return f"ncclDevKernel_{function}_{reduce_op}_{dtype}_RING_LL"


def collective_args(record: CallRecord, stream: int) -> dict[str, Any]:
    """Return the arguments of a communication kernel in Kineto's format, followed by distsim's additional ones."""
    fields = FIELDS.get(record.op)
    in_place = fields is not None and fields.in_place
    args: dict[str, Any] = {
        "Collective name": _COLLECTIVE_NAMES.get(record.op, record.op),
        "dtype": _SCALAR_TYPES.get(record.dtypes[0], record.dtypes[0]) if record.dtypes else "",
        "In msg nelems": _elements(record.input_shapes),
        "Out msg nelems": _elements(record.input_shapes if in_place else record.output_shapes),
        "In split size": str(list(record.input_splits or ())),
        "Out split size": str(list(record.output_splits or ())),
        "Group size": len(record.group.ranks),
        "Process Group Name": record.group.name,
        "Process Group Description": record.group.description,
        "Process Group Ranks": str(list(record.group.ranks)),
        "Rank": record.rank,
        "Src Rank": _source(record),
        "Dst Rank": _destination(record),
        "Seq": record.seq,
        "stream": stream,
        "device": record.rank,
        "State": record.state.value,
    }
    if record.reduce_op is not None:
        args["Reduce op"] = record.reduce_op
    if record.tag is not None:
        args["Tag"] = record.tag
    if record.site is not None:
        args["Call site"] = str(record.site)
    if record.error is not None:
        args["Error"] = record.error
    return args


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(shape) for shape in shapes)


def _source(record: CallRecord) -> int:
    """Return the root's rank, or -1, as in Kineto, if there is none."""
    end = {"send": record.rank, "recv": record.peer}.get(record.op, record.root)
    return -1 if end is None or record.op in ("reduce", "gather") else end


def _destination(record: CallRecord) -> int:
    end = {"send": record.peer, "recv": record.rank}.get(record.op, record.root)
    return -1 if end is None or record.op in ("broadcast", "scatter") else end


ROUNDING_S = 5e-10
"""Tolerance in seconds for slices that overlap by rounding; the trace is written in nanoseconds."""
FIRST_STREAM = 20
"""Track of the first stream, after the host threads. HTA treats any stream but -1 as the device's."""
STREAMS_A_GPU = 200
FIRST_CORRELATION = 1 << 30
"""First number that links a kernel to its launch. HTA stores such numbers in the smallest type that holds all of them.
"""
STEPS = 19
"""Track of the training steps on the device."""
HOST = 1
Event = dict[str, Any]


class Tracks:
    """Numbers of tracks from *first*: one for each label, and more if slices of a label overlap."""

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._free_from_s: list[float] = []
        self._labels: list[str] = []
        self._of_label: dict[str, list[int]] = {}

    def assign(self, label: str, start_s: float, end_s: float) -> int:
        """Return the track for a slice. Slices of a label must be passed in the order of their starts."""
        for track in self._of_label.setdefault(label, []):
            if self._free_from_s[track] <= start_s + ROUNDING_S:
                self._free_from_s[track] = end_s
                return self._first + track
        track = len(self._labels)
        count = len(self._of_label[label])
        self._labels.append(label if not count else f"{label} ({count + 1})")
        self._free_from_s.append(end_s)
        self._of_label[label].append(track)
        return self._first + track

    def labels(self) -> Iterator[tuple[int, str]]:
        """Yield every track with its label."""
        for track, label in enumerate(self._labels):
            yield self._first + track, label


CPU_STREAM = FIRST_STREAM - 2
"""Track of a rank's computation on the CPU, which HTA treats as a stream."""
CALLS = 3 << 29
"""First correlation number of calls that did not run on a simulated GPU, above those of all kernels."""
BESIDE_GPUS = 10_000
"""Number of the first stream for calls that ran on no simulated GPU, if the rank has GPUs."""
LINKS_PID = 1_000_000
"""Process number of the link counters, above those of all ranks."""

Slice = tuple[float, float, str]


def write_trace(outcome: Outcome, path: str) -> None:
    """Write the trace to the file *path* (`.gz` is compressed).

    If *path* ends in a slash or is a folder, write `rank0.json`, `rank1.json`, ... to it.

    Raises:
        UsageError: The run did not keep the data that a trace shows.
    """
    if not outcome.for_trace:
        raise UsageError(
            f"{path}: this run has kept neither its operators nor all of its calls; ask for both before it begins: "
            "distsim.simulate(..., trace=True), or distsim run --trace"
        )
    folder = Path(path)
    if not (path.endswith(("/", os.sep)) or folder.is_dir()):
        _write(folder, _header(outcome, 0), trace_events(outcome))
        return
    folder.mkdir(parents=True, exist_ok=True)
    for summary in outcome.ranks:
        name = f"rank{summary.rank}.json"
        events = rank_events(outcome, summary.rank, [])
        if summary.rank == 0:
            events = itertools.chain(events, link_events(outcome))
        _write(folder / name, _header(outcome, summary.rank), events)


def trace_events(outcome: Outcome) -> Iterator[Event]:
    """Yield all events of all ranks, the arrows between them, and the links."""
    placed: list[Placed] = []
    for summary in outcome.ranks:
        yield from rank_events(outcome, summary.rank, placed)
    for number, (start, start_s, end, end_s) in enumerate(arrows(placed)):
        for phase, call, time_s in (("s", start, start_s), ("f", end, end_s)):
            yield {
                "ph": phase,
                "bp": "e",
                "cat": "distsim",
                "name": call.record.op,
                "id": number,
                "pid": call.record.rank,
                "tid": call.track,
                "ts": us(time_s),
            }
    yield from link_events(outcome)


def rank_events(outcome: Outcome, rank: int, placed: list[Placed]) -> Iterator[Event]:
    """Yield the events of one rank's tracks: host threads, communication streams. Its calls are added to *placed*."""
    summary = next(one for one in outcome.ranks if one.rank == rank)
    yield meta(rank, "process_name", name=f"rank {rank} ({summary.device})")
    yield meta(rank, "process_sort_index", sort_index=rank)
    host, streams = Tracks(), Tracks(FIRST_STREAM if not outcome.gpu_tracks.get(rank) else BESIDE_GPUS)
    slices: list[tuple[float, float, Slice | CallRecord]] = []
    slices.extend((*piece[:2], piece) for piece in outcome.compute.get(rank, ()))
    tracks = outcome.gpu_tracks.get(rank, [])
    on_gpu = {id(record) for track in tracks for piece in track.slices for record in piece.records}
    for record in outcome.records.get(rank, ()):
        if record.rejected or id(record) in on_gpu:
            continue
        end_s = outcome.virtual_time_s if record.completed_s is None else record.completed_s
        slices.append((record.issued_s, end_s, record))
    slices.sort(key=lambda item: item[:2])
    spans = [] if tracks else _spans([piece[:2] for _, _, piece in slices if not isinstance(piece, CallRecord)])
    begun = {begun_s: number for number, (begun_s, _) in enumerate(spans, FIRST_CORRELATION)}
    numbers = itertools.count(CALLS)
    events: list[Event] = []
    for start_s, end_s, item in slices:
        if not isinstance(item, CallRecord):
            tid = host.assign("MainThread", start_s, end_s)
            number = begun.pop(start_s, None)
            launches = {} if number is None else {"correlation": number}
            events.append(slice_event(rank, tid, item[2], "cpu_op", start_s, end_s, launches))
        elif is_kernel(item):
            tid, number = streams.assign(f"stream of {item.group.label}", start_s, end_s), next(numbers)
            placed.append(Placed(item, tid))
            events.extend(_kernel_events(item, tid, end_s, number))
            at = host.assign(item.thread, start_s, start_s)
            events.append(slice_event(rank, at, call_name(item), "cpu_op", start_s, start_s, {"correlation": number}))
        else:
            tid = host.assign(item.thread, start_s, end_s)
            args = {"Process Group Name": item.group.name, "Seq": item.seq}
            name = call_name(item) if item.remote is None else call_text(item)
            events.append(slice_event(rank, tid, name, "cpu_op", start_s, end_s, args))
    if not tracks:
        steps = [(end_s, end_s) for end_s in outcome.step_ends.get(rank, ())]  # where the CPU is the device
        events.extend(step_events(rank, "CPU steps", steps))
        events.extend(_computing(rank, spans))
    computing = [] if tracks or not outcome.compute.get(rank) else [(CPU_STREAM, "CPU computing")]
    for tid, label in (*host.labels(), *computing, *streams.labels()):
        yield meta(rank, "thread_name", tid=tid, name=label)
        yield meta(rank, "thread_sort_index", tid=tid, sort_index=tid)
    events.extend(gpu_events(rank, tracks, placed))
    nest([event for event in events if event["ph"] == "X" and event["tid"] == HOST])
    yield from events


def nest(slices: list[Event]) -> None:
    """Change the slices of a track so that they are nested or disjoint, as trace viewers require.

    The end of host work is known, and its length is an estimate by class of work. A slice that would start in the
    middle of the previous one starts at its end.
    """
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    open_ends: list[float] = []
    for event in slices:
        event["ts"] = round(event["ts"], 3)
        end = round(event["ts"] + event["dur"], 3)
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        while open_ends and open_ends[-1] < end:
            event["ts"] = open_ends.pop()
        event["dur"] = round(end - event["ts"], 3)
        open_ends.append(end)


def _spans(pieces: list[tuple[float, float]]) -> list[list[float]]:
    """Return intervals of uninterrupted computation. They are merged because HTA rounds to microseconds, and many
    operators are shorter."""
    spans: list[list[float]] = []
    for begun_s, ended_s in pieces:
        if spans and begun_s - spans[-1][1] < 1e-9:
            spans[-1][1] = max(spans[-1][1], ended_s)
        else:
            spans.append([begun_s, ended_s])
    return spans


def _computing(rank: int, spans: list[list[float]]) -> Iterator[Event]:
    """Yield the computation of a rank without GPUs in the form in which HTA finds kernels.

    HTA assigns kernels to a step by the correlation with an operator of the host.
    """
    for number, (begun_s, ended_s) in enumerate(spans, FIRST_CORRELATION):
        args = {"stream": CPU_STREAM, "device": 0, "correlation": number}
        yield slice_event(rank, CPU_STREAM, "computing", "kernel", begun_s, ended_s, args)


def _kernel_events(record: CallRecord, stream: int, end_s: float, correlation: int) -> Iterator[Event]:
    args = collective_args(record, stream) | {"correlation": correlation}
    yield slice_event(record.rank, stream, kernel_name(record), "kernel", record.issued_s, end_s, args)
    started_s = end_s if record.started_s is None else min(record.started_s, end_s)
    if us(started_s) > us(record.issued_s):
        yield slice_event(record.rank, stream, _waiting(record), "wait", record.issued_s, started_s, {})


def _waiting(record: CallRecord) -> str:
    """Return the name of the part of a call in which its rank waits for others."""
    if not record.is_p2p:
        return f"waits for the others of {record.op} #{record.seq}"
    return f"waits for {'any rank' if record.peer is None else f'rank {record.peer}'}"


def link_events(outcome: Outcome) -> Iterator[Event]:
    """Yield the utilisation of every link that has samples, in percent."""
    if not outcome.link_samples:
        return
    yield meta(LINKS_PID, "process_name", name=f"links of {outcome.cluster}")
    yield meta(LINKS_PID, "process_sort_index", sort_index=LINKS_PID)
    for time_s, index, fraction in outcome.link_samples:
        yield {
            "ph": "C",
            "pid": LINKS_PID,
            "tid": 0,
            "name": outcome.links[index].name,
            "ts": us(time_s),
            "args": {"utilisation %": round(100 * fraction, 3)},
        }


def _header(outcome: Outcome, rank: int) -> Event:
    groups = {record.group.name: record.group for records in outcome.records.values() for record in records}
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {
            "backend": outcome.backend,
            "rank": rank,
            "world_size": outcome.world_size,
            "pg_count": len(groups),
            "pg_config": [
                {
                    "pg_name": group.name,
                    "pg_desc": group.description,
                    "backend_config": outcome.backend,
                    "pg_size": len(group.ranks),
                    "ranks": list(group.ranks),
                }
                for group in groups.values()
                if rank in group.ranks
            ],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": f"{outcome.program} rank {rank}",
    }


def _write(path: Path, header: Event, events: Iterable[Event]) -> None:
    with open_output(path, "wb") as raw:
        # No time stamp in the gzip header: equal runs give equal bytes.
        binary = gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as file:
            head = json.dumps(header, indent=1)
            file.write(head[: head.rindex("\n}")] + ',\n "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")


def gpu_events(rank: int, tracks: list[GpuTrack], placed: list[Placed]) -> Iterator[Event]:
    """Yield all slices of *tracks*, the GPUs of *rank*. Its calls are added to *placed*."""
    for number, track in enumerate(tracks):
        first = FIRST_STREAM + number * STREAMS_A_GPU
        used = sorted({piece.stream for piece in track.slices})
        for stream in used:
            name = f"GPU {track.index} stream {stream}: {track.streams[stream]}"
            yield meta(rank, "thread_name", tid=first + stream, name=name)
            yield meta(rank, "thread_sort_index", tid=first + stream, sort_index=first + stream)
        for correlation, piece in enumerate(track.slices, FIRST_CORRELATION):
            if piece.records:
                yield from _communication(rank, first, track.index, piece, correlation, placed)
            else:
                yield from _kernel(rank, first, track.index, piece, correlation)
        yield from step_events(rank, f"GPU {track.index} steps", track.steps)


def _kernel(rank: int, first: int, device: int, piece: KernelSlice, correlation: int) -> Iterator[Event]:
    args = {"stream": first + piece.stream, "device": device, "correlation": correlation}
    is_copy = piece.kind in ("h2d", "d2h")
    name = f"Memcpy of {piece.name}" if is_copy else f"{piece.name} [{piece.kind}]" if piece.kind else piece.name
    category = "gpu_memcpy" if is_copy else "kernel"
    yield slice_event(rank, first + piece.stream, name, category, piece.begun_s, piece.ended_s, args)
    called_s = piece.launched_s - piece.host_s
    host = {"correlation": correlation}
    yield slice_event(rank, HOST, f"aten::{piece.name}", "cpu_op", called_s, piece.launched_s, host)


def _communication(
    rank: int, first: int, device: int, piece: KernelSlice, correlation: int, placed: list[Placed]
) -> Iterator[Event]:
    """Yield the events of one communication kernel. A batch of messages is one kernel, named after its first
    message.
    """
    tid = first + piece.stream
    records: list[CallRecord] = [record for record in piece.records if is_kernel(record)]
    if not records:
        return
    args: dict[str, Any] = collective_args(records[0], tid) | {"device": device, "correlation": correlation}
    if len(records) > 1:
        args["Calls"] = ", ".join(f"{record.op} {record.peer}" for record in records)
    placed.extend(Placed(record, tid) for record in records)
    yield slice_event(rank, tid, kernel_name(records[0]), "kernel", piece.begun_s, piece.ended_s, args)
    called_s, host = piece.launched_s - piece.host_s, {"correlation": correlation}
    yield slice_event(rank, HOST, call_name(records[0]), "cpu_op", called_s, piece.launched_s, host)
    started_s = min((r.started_s for r in records if r.started_s is not None), default=piece.ended_s)
    if started_s - piece.begun_s > 1e-9:
        yield slice_event(rank, tid, _waiting(records[0]), "wait", piece.begun_s, min(started_s, piece.ended_s), {})


def step_events(rank: int, label: str, steps: list[tuple[float, float]]) -> Iterator[Event]:
    """Yield `ProfilerStep#n` events for host and device, as torch's profiler does. *steps* has the ends on both."""
    if not steps:
        return
    yield meta(rank, "thread_name", tid=STEPS, name=label)
    for number, (before, after) in enumerate(zip([(0.0, 0.0), *steps], steps, strict=False), 1):
        name = f"ProfilerStep#{number}"
        yield slice_event(rank, HOST, name, "user_annotation", before[0], after[0], {})
        yield slice_event(rank, STEPS, name, "gpu_user_annotation", before[1], after[1], {})


@dataclass(frozen=True, slots=True)
class Placed:
    """A call and the track its slice is drawn on."""

    record: CallRecord
    track: int


Arrow = tuple[Placed, float, Placed, float]
"""An arrow from one call at a time in seconds to another call at a time."""


def arrows(calls: Iterable[Placed]) -> Iterator[Arrow]:
    """Yield one arrow for each collective in which a rank waited, and one for each received send."""
    meetings: dict[tuple[str, int], list[Placed]] = {}
    sends: dict[tuple[str, int, int, int], deque[Placed]] = {}
    receives: list[tuple[tuple[str, int, int, int], Placed]] = []
    for call in calls:
        record = call.record
        if not record.is_p2p:
            meetings.setdefault((record.group.name, record.seq), []).append(call)
        elif record.peer is not None and record.op == "send":
            key = (record.group.name, record.rank, record.peer, record.tag or 0)
            sends.setdefault(key, deque()).append(call)
        elif record.peer is not None and record.completed_s is not None:
            receives.append(((record.group.name, record.peer, record.rank, record.tag or 0), call))
    for met in meetings.values():
        first = min(met, key=lambda call: (call.record.issued_s, call.record.rank))
        last = max(met, key=lambda call: (call.record.issued_s, -call.record.rank))
        started_s = first.record.started_s
        if started_s is not None and last.record.issued_s > first.record.issued_s:
            yield last, last.record.issued_s, first, started_s
    for key, receive in receives:
        waiting = sends.get(key)
        completed_s = receive.record.completed_s
        if waiting and completed_s is not None:
            send = waiting.popleft()
            yield send, send.record.issued_s, receive, completed_s


def slice_event(
    pid: int, tid: int, name: str, category: str, start_s: float, end_s: float, args: dict[str, Any]
) -> Event:
    """Return an event with start and duration."""
    start, end = us(start_s), us(end_s)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": round(max(end - start, 0.0), 3),
        "args": args,
    }


def meta(pid: int, fact: str, tid: int = 0, **args: Any) -> Event:
    """Return the metadata event that names a process or track and sets its position."""
    return {"ph": "M", "name": fact, "pid": pid, "tid": tid, "ts": 0, "args": args}


def us(seconds: float) -> float:
    """Return microseconds rounded to nanoseconds, so that nested slices keep their order."""
    return round(seconds * 1e6, 3)
