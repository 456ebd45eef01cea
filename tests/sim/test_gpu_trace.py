"""The trace of simulated GPUs, as Holistic Trace Analysis reads it."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from distsim.network.critical_path import Ran, critical_path
from distsim.report import Summary, report_document, write_trace
from distsim.sim import simulate
from distsim.sim.device.timeline import Comm, Kernel, Load
from distsim.sim.device.timeline import timeline as timeline_module
from tests.report.made import call

WIDTH = 2048


def pipeline() -> None:
    """Two stages, each a rank: the second waits for the first, and both sum what the layers' weights are."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    with torch.device("cuda"):
        layer = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        x = torch.empty(4096, WIDTH, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(4):
        if rank == 0:
            out = layer(x)
            dist.send(out, 1)
        else:
            dist.recv(x, 0)
            out = layer(layer(x))
        out.sum().backward()
        dist.all_reduce(layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
    """The section `training` and the slices of each rank's own file."""
    outcome = simulate(pipeline, "dgx-h100:1", nproc_per_node=2, trace=True)
    folder = tmp_path_factory.mktemp("trace")
    write_trace(outcome, f"{folder}/")
    files = {rank: json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in (0, 1)}
    events = {rank: [e for e in trace["traceEvents"] if e["ph"] == "X"] for rank, trace in files.items()}
    section: dict[str, Any] = report_document(outcome)["training"]
    return section, events


def merged_s(spans: list[tuple[float, float]], from_us: float, to_us: float) -> float:
    """Time between the two that at least one span covers."""
    total, end = 0.0, from_us
    for begin, finish in sorted(spans):
        begin, finish = max(begin, end), min(finish, to_us)
        if finish > begin:
            total += finish - begin
            end = finish
    return total * 1e-6


@pytest.mark.parametrize("rank", [0, 1])
def test_htas_temporal_breakdown_is_ours(rank: int, told: tuple[Any, dict[int, list[dict[str, Any]]]]) -> None:
    """Idle, compute, and the rest, as HTA takes them from kernels and their names, are the report's shares."""
    section, events = told
    steps = [e for e in events[rank] if e["cat"] == "gpu_user_annotation"]
    begin = steps[section["first_counted"] - 1]["ts"]
    end = steps[-1]["ts"] + steps[-1]["dur"]
    kernels = [e for e in events[rank] if e["args"].get("stream", -1) != -1]
    spans = {e: [] for e in ("all", "compute")}
    for event in kernels:
        span = (event["ts"], event["ts"] + event["dur"])
        spans["all"].append(span)
        if not event["name"].startswith("nccl"):
            spans["compute"].append(span)
    busy, compute = (merged_s(spans[name], begin, end) for name in ("all", "compute"))
    ours = section["ranks"][rank]
    counted = section["steps"] - section["first_counted"] + 1
    assert compute == pytest.approx(counted * ours["compute_s"], rel=1e-3)
    assert (end - begin) * 1e-6 - busy == pytest.approx(counted * ours["host_s"], rel=1e-3, abs=1e-8)
    assert busy - compute == pytest.approx(counted * (ours["exposed_s"] + ours["bubble_s"]), rel=1e-3)


def test_the_second_stage_waits_in_a_bubble(told: tuple[dict[str, Any], Any]) -> None:
    """Its receive is there before the message: a bubble, and no rank's late all_reduce counts as one."""
    first, second = told[0]["ranks"]
    assert second["bubble_s"] > 0
    assert first["bubble_s"] < second["bubble_s"]
    assert first["late_s"] > 0, "the second stage, which has two products, comes late to the all_reduce"


def test_kernels_lie_on_streams_and_their_operators_on_the_host(
    told: tuple[Any, dict[int, list[dict[str, Any]]]],
) -> None:
    """A kernel's correlation finds the operator that launched it, before it; steps are named as the profiler does."""
    events = told[1][1]
    host = {e["args"]["correlation"]: e for e in events if e["cat"] == "cpu_op" and "correlation" in e["args"]}
    kernels = [e for e in events if e["cat"] == "kernel" and "correlation" in e["args"]]
    assert kernels
    for kernel in kernels:
        assert host[kernel["args"]["correlation"]]["ts"] < kernel["ts"]
    assert any(e["name"].endswith("[gemm]") for e in kernels)
    assert {e["name"] for e in events if e["cat"] == "user_annotation"} == {f"ProfilerStep#{n}" for n in (1, 2, 3, 4)}
    assert any(e["name"].startswith("ncclDevKernel_AllReduce") for e in events if e["cat"] == "kernel")


def test_slices_of_a_stream_do_not_overlap(told: tuple[Any, dict[int, list[dict[str, Any]]]]) -> None:
    """A stream runs one after another."""
    for events in told[1].values():
        streams: dict[int, list[dict[str, Any]]] = {}
        for event in events:
            if event["args"].get("stream", -1) != -1:
                streams.setdefault(event["args"]["stream"], []).append(event)
        for slices in streams.values():
            ordered = sorted(slices, key=lambda e: e["ts"])
            for before, after in itertools.pairwise(ordered):
                assert before["ts"] + before["dur"] <= after["ts"] + 0.002


def test_the_critical_path_goes_through_the_stage_that_was_waited_for(told: tuple[dict[str, Any], Any]) -> None:
    """Of the last step: the first stage's product, the message, the second stage's two, the sum of gradients; all of it
    is the step."""
    section = told[0]
    path = section["critical_path"]
    assert sum(part["time_s"] for part in path) == pytest.approx(section["step_times_s"][-1])
    seconds = {(part["kind"], part["name"]): part["time_s"] for part in path}
    addmm = next(o for o in section["operators"] if o["name"] == "addmm")  # three a step on two ranks
    assert seconds["compute", "addmm"] == pytest.approx(2 * addmm["time_s"], rel=1e-3)
    assert ("communication", "recv of default_pg") in seconds
    assert ("communication", "all_reduce of default_pg") in seconds


def kernel(begun_s: float, ended_s: float, name: str) -> Kernel:
    return Kernel(ended_s - begun_s, 0.0, name=name, begun_s=begun_s, ended_s=ended_s)


def comm(rank: int, begun_s: float, started_s: float, ended_s: float) -> Comm:
    record = call(rank, "all_reduce", 1, begun_s, started_s, ended_s)
    return Comm(0.0, Load(), lambda _: None, record, [record], begun_s=begun_s, ended_s=ended_s)


def test_a_late_rank_is_followed() -> None:
    """Rank 0 waits in an all_reduce from second 1 on; rank 1 comes in second 5, after four of mm and one of nothing."""
    ran = {
        0: Ran([kernel(0, 1, "add"), comm(0, 1, 5, 7), kernel(7, 9, "sum")]),
        1: Ran([kernel(0, 4, "mm"), comm(1, 5, 5, 7)]),
    }
    parts, from_s = critical_path(ran, 0, 0.5, 9.0)
    path = {(part.kind, part.name): part.time_s for part in parts}
    assert from_s == 0.5
    assert path == {
        ("compute", "mm"): 3.5,
        ("communication", "all_reduce of default_pg"): 2.0,
        ("compute", "sum"): 2.0,
        ("host", "nothing was launched"): 1.0,
    }


def test_the_path_goes_back_as_far_as_ranks_remember() -> None:
    """Rank 1 no longer knows what it ran before second 3: the path begins there, and is not left out."""
    ran = {
        0: Ran([kernel(0, 1, "add"), comm(0, 1, 5, 7), kernel(7, 9, "sum")]),
        1: Ran([kernel(3, 4, "mm"), comm(1, 5, 5, 7)], since_s=3.0),
    }
    parts, from_s = critical_path(ran, 0, 0.5, 9.0)
    assert from_s == 3.0
    assert sum(part.time_s for part in parts) == 6.0


def test_a_step_of_more_kernels_than_are_remembered_has_the_end_of_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the path's last part, says how much of the step that is, and calls it so."""
    monkeypatch.setattr(timeline_module, "MOST_DONE", 4)
    outcome = simulate(stepping, "dgx-h100:1", nproc_per_node=1)
    section = report_document(outcome)["training"]
    share = section["critical_path_share"]
    assert 0.0 < share < 0.9
    told_s = sum(part["time_s"] for part in section["critical_path"])
    assert told_s == pytest.approx(share * section["step_times_s"][-1])
    console = Console(file=io.StringIO(), width=120)
    console.print(Summary(outcome))
    assert f"critical path of the last {share:.0%} of step 3" in console.file.getvalue()  # type: ignore[attr-defined]


def stepping() -> None:
    """Three steps of a linear layer's optimizer, of more than four kernels each."""
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.ones(512, 1024, device="cuda")).relu().sum().backward()
        optimizer.step()


def counting() -> None:
    """Operators on the host between others on a GPU, as Adam's step numbers are."""
    x, count = torch.zeros(8, device="cuda"), torch.zeros(1)
    for _ in range(4):
        x += 1
        count += 1


def test_a_hosts_operators_come_one_after_another(tmp_path: Path) -> None:
    """One lies before the next, or within it: none begins inside another and ends after it."""
    outcome = simulate(counting, "dgx-h100:1", nproc_per_node=1, trace=True)
    write_trace(outcome, f"{tmp_path}/")
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op")
    assert len(spans) >= 8
    assert all(one[1] <= other[0] + 1e-3 for one, other in itertools.pairwise(spans))
