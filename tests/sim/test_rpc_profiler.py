"""torch's legacy profiler over RPC, and TorchScript that names functions which a simulation replaces."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from sim.running import ranks
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile


def work() -> torch.Tensor:
    """Half a second, between two operators."""
    with record_function("inside"):
        t = torch.ones(3) + 1
        time.sleep(0.5)
        return torch.relu(t)


def doubled(t: torch.Tensor) -> torch.Tensor:
    return torch.add(t, t)


@rpc.functions.async_execution
def passed_on(to: str, t: torch.Tensor) -> Any:
    """What it returns another worker computes."""
    return rpc.rpc_async(to, doubled, args=(t,))


def profiled_calls() -> list[tuple[str, int, bool, float, float]] | None:
    """Name, worker, remote or not, begin and end in ms of what the first of three workers saw."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    found = None
    if rank == 0:
        with profile() as seen:
            with record_function("outside"):
                rpc.rpc_sync("worker1", work)
            rpc.rpc_async("worker1", passed_on, args=("worker2", torch.ones(2))).wait()
            rpc.remote("worker2", torch.mul, args=(torch.ones(2), 2)).to_here()
        found = [
            (e.name, e.node_id, e.is_remote, e.time_range.start / 1e3, e.time_range.end / 1e3)
            for e in seen.function_events
        ]
    rpc.shutdown()
    return found


def test_a_callees_operators_are_its_callers() -> None:
    """They have the call's name before their own, the worker that ran them, and virtual times inside the call's; what
    the simulation adds is not shown."""
    events = ranks(profiled_calls, 3).results[0]
    by_name = {event[0]: event for event in events}
    call, mark = "rpc_sync#work(worker0 -> worker1)", "#remote_op: "
    nested = f"rpc_async#passed_on(worker0 -> worker1){mark}rpc_async#doubled(worker1 -> worker2)"
    assert by_name[call][1:3] == (0, False)
    inside, relu = by_name[f"{call}{mark}inside"], by_name[f"{call}{mark}aten::relu"]
    assert inside[1:3] == relu[1:3] == (1, True)
    assert by_name["outside"][3] <= by_name[call][3] < inside[3] < relu[3] <= inside[4] < by_name[call][4]
    assert 500 < by_name[call][4] - by_name[call][3] < 502
    assert by_name[f"{call}{mark}aten::add"][4] < 10
    assert relu[3] > 500
    assert by_name[nested][1:3] == (1, True)
    assert by_name[f"{nested}{mark}aten::add"][1:3] == (2, True)
    assert by_name[f"rpc_remote#aten::mul(worker0 -> worker2){mark}aten::mul"][1] == 2
    assert not [name for name in by_name if "Dispatch" in name]
    assert len([event for event in events if event[0] == f"{call}{mark}aten::relu"]) == 1


def saves(t: torch.Tensor, path: str) -> torch.Tensor:
    torch.save(t, path)
    return t + 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_knows_what_stands_for_torchs_functions() -> None:
    """A function that calls torch.save compiles within a rank, as it does outside."""

    def body() -> str:
        return str(torch.jit.script(saves).graph)

    assert all("aten::save" in graph for graph in ranks(body).results)
