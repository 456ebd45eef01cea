"""torch.profiler sees the kernels of simulated GPUs."""

from __future__ import annotations

import gzip
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
        assert list(kernels) == ["mm_kernel", "ncclDevKernel_AllReduce", "Memcpy DtoH"]
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


def _nodes(path: Path) -> list[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        nodes: list[dict[str, Any]] = json.load(file)["nodes"]
    return nodes


def test_each_rank_writes_an_execution_trace_with_its_collectives(tmp_path: Path) -> None:
    """A communication node has the attributes that replay tools and Chakra read."""

    def observed() -> None:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        pair = dist.new_group([0, 2])
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / f"{rank}.json"))
        assert observer.is_registered
        x = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
        observer.start()
        with torch.profiler.record_function("step"):
            y = x @ x
            if rank != 1:
                dist.all_reduce(y, group=pair)
        observer.stop()
        dist.barrier(device_ids=[rank])
        observer.unregister_callback()

    assert distsim.simulate(observed, "dgx-h100:1", nproc_per_node=3).exit_code == 0
    names = [node["name"] for node in _nodes(tmp_path / "1.json")]
    thread, process = (f"[pytorch|profiler|execution_trace|{name}]" for name in ("thread", "process"))
    assert names == [thread, "step", "aten::mm", process]
    nodes = {node["name"]: node for node in _nodes(tmp_path / "2.json")}
    assert list(nodes) == [
        thread,
        "step",
        "aten::mm",
        "c10d::allreduce_",
        "record_param_comms",
        "nccl:all_reduce",
        process,
    ]
    for child, parent in (
        ("aten::mm", "step"),
        ("c10d::allreduce_", "step"),
        ("record_param_comms", "c10d::allreduce_"),
    ):
        assert nodes[child]["ctrl_deps"] == nodes[parent]["id"]
    assert nodes["aten::mm"]["outputs"]["values"][0] == nodes["c10d::allreduce_"]["inputs"]["values"][0][0]
    assert nodes["aten::mm"]["inputs"]["types"] == ["Tensor(c10::BFloat16)"] * 2
    attributes = {entry["name"]: entry["value"] for entry in nodes["record_param_comms"]["attrs"]}
    expected = {"collective_name": "allreduce", "dtype": "BFloat16", "in_msg_nelems": 64, "pg_size": 2}
    expected |= {"global_rank_start": 0, "global_rank_stride": 2}
    assert attributes.items() >= expected.items()


def test_a_profile_with_an_observer_writes_its_trace(tmp_path: Path) -> None:
    """On the CPU, compressed, by `profile(execution_trace_observer=...)`."""
    path = tmp_path / "trace.json.gz"

    def observed() -> None:
        dist.init_process_group("gloo")
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        with torch.profiler.profile(execution_trace_observer=observer):
            dist.broadcast(torch.ones(4), 0)

    assert distsim.simulate(observed, nproc_per_node=1).exit_code == 0
    assert [node["name"] for node in _nodes(path)][1:-1] == ["aten::ones", "c10d::broadcast_", "gloo:broadcast"]
