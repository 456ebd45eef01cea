"""Ten observers of torch look at one program, and see on sim what they see on gloo."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conformance.arms import Conform, sim
from conformance.plain import error_of
from torch import nn
from torch.distributed import c10d_logger
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._debug_mode import DebugMode
from torch.utils.flop_counter import FlopCounterMode

COMMUNICATION = ("c10d::", "gloo:", "_c10d_functional::")
AGAIN = "_c10d_functional::wait_tensor"
"""torch records it once for each layer of its dispatcher, of which a simulation has fewer."""


def calls(rank: int, world_size: int) -> None:
    t = torch.ones(4)
    dist.all_reduce(t)
    dist.all_gather([torch.zeros(4) for _ in range(world_size)], t)
    gathered = torch.zeros(4 * world_size)
    dist.all_gather_into_tensor(gathered, t)
    dist.reduce_scatter_tensor(torch.zeros(4), gathered)
    dist.broadcast(t, 0)
    dist.all_to_all_single(torch.zeros(4), t)
    dist.barrier()
    if rank == 0:
        dist.send(t, 1)
    elif rank == 1:
        dist.recv(t, 0)
    functional.wait_tensor(functional.all_reduce(t, "sum", dist.group.WORLD))


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def comm_debug_mode(rank: int, world_size: int) -> dict[str, Any]:
    model = sharded()
    with CommDebugMode() as mode:
        calls(rank, world_size)
        model(torch.ones(2, 4)).sum().backward()
    return {str(operator): count for operator, count in mode.get_comm_counts().items()}


def debug_mode(rank: int, world_size: int) -> dict[str, Any]:
    with DebugMode() as mode:
        calls(rank, world_size)
    return {"shown": mode.debug_string()}


def execution_trace(rank: int, world_size: int) -> dict[str, Any]:
    path = tempfile.mktemp(suffix=".json")
    observer = ExecutionTraceObserver().register_callback(path)
    observer.start()
    calls(rank, world_size)
    observer.stop()
    observer.unregister_callback()
    nodes = json.loads(Path(path).read_text())["nodes"]
    shown = [(n["name"], n["inputs"]["shapes"]) for n in nodes if n["name"].startswith(COMMUNICATION)]
    return {"nodes": sorted(pair for pair in shown if pair[0] != AGAIN)}


def profiler(rank: int, world_size: int) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        calls(rank, world_size)
    events = profiled.key_averages(group_by_input_shape=True)
    shown = [(e.key, e.input_shapes, e.count) for e in events if e.key.startswith(COMMUNICATION)]
    return {"events": sorted(event for event in shown if event[0] != AGAIN)}


def flop_counter(rank: int, world_size: int) -> dict[str, Any]:
    model = sharded()
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 4)).sum().backward()
        calls(rank, world_size)
    return {"flops": counter.get_total_flops(), "by module": {k: str(v) for k, v in counter.get_flop_counts().items()}}


def mod_tracker(rank: int, world_size: int) -> dict[str, Any]:
    model, seen = sharded(), list[Any]()
    with ModTracker() as tracker:
        model[0].register_forward_hook(lambda *_: seen.append((sorted(tracker.parents), tracker.is_bw)))
        model(torch.ones(2, 4)).sum().backward()
    return {"parents": seen}


def hooks_of_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    model, seen = sharded(), list[str]()
    model[0].register_forward_pre_hook(lambda *_: seen.append("before forward"))
    model[0].register_forward_hook(lambda *_: seen.append("after forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("after backward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(f"gradient of {list(p.shape)}"))
    model(torch.ones(2, 4)).sum().backward()
    return {"order": seen}


def hooks_of_works(rank: int, world_size: int) -> dict[str, Any]:
    seen: list[Any] = []
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    future = work.get_future()
    future.then(lambda f: seen.append(f.value()[0].tolist())).wait()
    future.add_done_callback(lambda f: seen.append(f.done()))
    work.wait()
    group = dist.distributed_c10d._get_default_group()
    return {
        "seen": seen,
        "completed": (work.is_completed(), work.is_success(), work.exception()),
        "completion hook": error_of(group._register_on_completion_hook, seen.append),
    }


def logger(rank: int, world_size: int) -> dict[str, Any]:
    kept: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    handler, log = Kept(), c10d_logger._c10d_logger
    log.addHandler(handler)
    calls(rank, world_size)
    log.removeHandler(handler)
    return {"lines": kept, "name": log.name, "handler": type(log.handlers[0]).__name__}


def time_estimator(rank: int, world_size: int) -> dict[str, Any]:
    """gloo has none."""

    def estimate() -> None:
        with dist._time_estimator():
            dist.all_reduce(torch.ones(4))

    return {"says": error_of(estimate)}


OBSERVERS = [
    comm_debug_mode,
    execution_trace,
    profiler,
    flop_counter,
    mod_tracker,
    hooks_of_fsdp,
    hooks_of_works,
    logger,
    time_estimator,
]


@pytest.mark.slow
@pytest.mark.parametrize("body", OBSERVERS)
def test_an_observer_sees_what_it_sees_on_gloo(conform: Conform, body: Any) -> None:
    """Operators, shapes, counts, hooks and their order, futures and log lines."""
    conform(body)


@pytest.mark.slow
def test_debug_mode_sees_each_call() -> None:
    """As under torchrun on gloo; in forked processes, as this folder has them for gloo, torch's mode does not end."""
    for found in sim(debug_mode):
        shown = [line.split(", SimGroup")[0].strip() for line in found["shown"].splitlines() if "c10d" in line]
        assert shown[:6] == [
            "c10d::allreduce_(['t: f32[4]']",
            "c10d::allgather_([['t: f32[4]', 't: f32[4]', 't: f32[4]', 't: f32[4]']], ['t: f32[4]']",
            "c10d::_allgather_base_(t: f32[16], t: f32[4]",
            "c10d::_reduce_scatter_base_(t: f32[4], t: f32[16]",
            "c10d::broadcast_(['t: f32[4]']",
            "c10d::alltoall_base_(t: f32[4], t: f32[4]",
        ]
