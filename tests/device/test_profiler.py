"""torch.profiler sees the kernels of simulated GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import distsim

ALL = (ProfilerActivity.CPU, ProfilerActivity.CUDA)


def profiled(activities: tuple[ProfilerActivity, ...], trace: str) -> Any:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    x, begun, ended = torch.randn(1024, 1024, device="cuda"), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=activities, record_shapes=True) as seen:
        begun.record()
        y = x @ x
        ended.record()
        dist.all_reduce(y)
        y.cpu()
    if rank == 0:
        seen.export_chrome_trace(trace)
    events = [(e.name, e.device_type == DeviceType.CUDA, e.device_time, e.device_index) for e in seen.events() or []]
    averages = {row.key: (row.count, row.device_time_total) for row in seen.key_averages()}
    return events, averages, 1e3 * begun.elapsed_time(ended), seen.key_averages().table(sort_by="cuda_time_total")


def run(activities: tuple[ProfilerActivity, ...], folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    path = folder / "trace.json"
    outcome = distsim.simulate(profiled, "dgx-h100:1", (activities, str(path)), nproc_per_node=2)
    return outcome.results, json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize("activities", [ALL, ALL[1:]])
def test_kernels_and_what_launched_them(activities: tuple[ProfilerActivity, ...], tmp_path: Path) -> None:
    """Kernels, copies and communication have the time that events around them measure, and that of an operator is its
    kernels'; with the GPU's activity alone there are no operators."""
    results, trace = run(activities, tmp_path)
    for rank, (events, averages, elapsed_us, table) in enumerate(results):
        kernels = {name: (time_us, index) for name, on_gpu, time_us, index in events if on_gpu}
        assert list(kernels) == ["mm_kernel", "ncclDevKernel_AllReduce", "Memcpy (host and device)"]
        time_us, index = kernels["mm_kernel"]
        assert index == rank
        assert 0 < elapsed_us - time_us < 15  # the first event was there before the launch
        assert averages["ncclDevKernel_AllReduce"][0] == 1
        assert "Self CUDA time total" in table
        both = {"aten::mm": "mm_kernel", "c10d::allreduce_": "ncclDevKernel_AllReduce"}
        for operator, kernel in both.items():
            assert (operator in averages) == (activities == ALL)
            if activities == ALL:
                assert averages[operator] == averages[kernel]
    shown = [event for event in trace if event.get("cat") in ("kernel", "gpu_memcpy")]
    assert [event["args"]["stream"] for event in shown] == [0, 0, 0]
    by = {event["args"].get("External id"): event["name"] for event in trace if event.get("cat") == "cpu_op"}
    if activities == ALL:
        assert next(by.get(event["args"]["External id"]) for event in shown) == "aten::mm"


def test_the_host_alone_has_no_kernels(tmp_path: Path) -> None:
    """Without the GPU's activity nobody sees what it ran."""
    results, trace = run(ALL[:1], tmp_path)
    assert not any(on_gpu for events, *_ in results for _, on_gpu, *_ in events)
    assert {event.get("cat") for event in trace} <= {"cpu_op", "user_annotation"}


def stacks(path: str) -> None:
    with profile(activities=ALL, with_stack=True, profile_memory=True) as seen:
        torch.ones(4, device="cuda").add(1)
    seen.export_stacks(path, "self_cuda_time_total")


def test_what_a_profile_has_not_is_said(tmp_path: Path) -> None:
    """Stacks and memory that were asked for are missing by name."""
    notes = distsim.simulate(stacks, "dgx-h100:1", (str(tmp_path / "stacks"),), nproc_per_node=1).notes
    for asked in ("with_stack=True", "profile_memory=True"):
        assert any(asked in note for note in notes)


def test_an_execution_trace_lacks_communication_and_says_so(tmp_path: Path) -> None:
    """Its nodes of collectives come from C++ that a simulated group does not pass."""

    def observed() -> None:
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(str(tmp_path / "trace.json"))
        observer.start()
        observer.stop()
        observer.unregister_callback()

    notes = distsim.simulate(observed, "dgx-h100:1", nproc_per_node=1).notes
    assert any("the trace has no communication nodes; --trace FILE" in note for note in notes)


def test_one_rank_writes_an_execution_trace(tmp_path: Path) -> None:
    """torch has one observer in a process, which a second rank would crash: it goes without, and a note says so."""

    def observed() -> bool:
        dist.init_process_group("nccl")
        path = tmp_path / f"trace{dist.get_rank()}.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        dist.barrier(device_ids=[dist.get_rank()])
        observer.start()
        torch.ones(1, device="cuda")
        observer.stop()
        dist.barrier(device_ids=[dist.get_rank()])
        observer.unregister_callback()
        return path.exists()

    for _ in range(2):
        outcome = distsim.simulate(observed, "dgx-h100:1", nproc_per_node=2)
        assert outcome.results == [True, False]
        assert any("the first rank alone writes a file" in note for note in outcome.notes)
        (tmp_path / "trace0.json").unlink()
