"""The streams of a rank's simulated GPUs in the trace: kernels, communication kernels, steps.

A kernel lies where it ran, on its stream, and its operator on the host's track, where it was launched. Holistic Trace
Analysis takes what has a stream for the device's work and tells communication by its name, so its temporal breakdown
(idle, compute, the rest) is that of the report: host-bound, compute, exposed and bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distsim.debug.records import CallRecord
from distsim.report.tracing.arrows import Placed
from distsim.report.tracing.events import Event, meta, slice_event
from distsim.report.tracing.kineto import call_name, collective_args, is_kernel, kernel_name

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import GpuTrack, KernelSlice

__all__ = ["FIRST_CORRELATION", "FIRST_STREAM", "STREAMS_A_GPU", "gpu_events", "step_events"]

FIRST_STREAM = 20
"""Track of the first stream; host threads come before it. HTA takes any stream but -1 for the device's."""
STREAMS_A_GPU = 200
FIRST_CORRELATION = 1 << 30
"""Of a kernel and what launched it. HTA takes the smallest type that holds these, for numbers of events, too."""
STEPS = 19
"""Track of the steps as the device had them."""
HOST = 1


def gpu_events(rank: int, tracks: list[GpuTrack], placed: list[Placed]) -> Iterator[Event]:
    """All slices of *tracks*, the GPUs of *rank*. Its calls are added to *placed*."""
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
    is_copy = piece.kind == "transfer"
    name = f"Memcpy of {piece.name}" if is_copy else f"{piece.name} [{piece.kind}]" if piece.kind else piece.name
    category = "gpu_memcpy" if is_copy else "kernel"
    yield slice_event(rank, first + piece.stream, name, category, piece.begun_s, piece.ended_s, args)
    called_s = piece.launched_s - piece.host_s
    host = {"correlation": correlation}
    yield slice_event(rank, HOST, f"aten::{piece.name}", "cpu_op", called_s, piece.launched_s, host)


def _communication(
    rank: int, first: int, device: int, piece: KernelSlice, correlation: int, placed: list[Placed]
) -> Iterator[Event]:
    """One kernel; a batch of messages is one, too, named after its first."""
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
        peer = "any rank" if records[0].peer is None else f"rank {records[0].peer}"
        what = f"waits for {peer if records[0].is_p2p else f'the others of {records[0].op} #{records[0].seq}'}"
        yield slice_event(rank, tid, what, "wait", piece.begun_s, min(started_s, piece.ended_s), {})


def step_events(rank: int, label: str, steps: list[tuple[float, float]]) -> Iterator[Event]:
    """`ProfilerStep#n` as torch's profiler has it: of the host, and of the device; *steps* ended there and there."""
    if not steps:
        return
    yield meta(rank, "thread_name", tid=STEPS, name=label)
    for number, (before, after) in enumerate(zip([(0.0, 0.0), *steps], steps, strict=False), 1):
        name = f"ProfilerStep#{number}"
        yield slice_event(rank, HOST, name, "user_annotation", before[0], after[0], {})
        yield slice_event(rank, STEPS, name, "gpu_user_annotation", before[1], after[1], {})
