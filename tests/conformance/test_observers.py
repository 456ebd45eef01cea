"""Observers of torch look at one program, and see on sim what they see on gloo."""

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
from torch.distributed import c10d_logger
from torch.profiler import ExecutionTraceObserver
from torch.utils._debug_mode import DebugMode

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
    execution_trace,
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
