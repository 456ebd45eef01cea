"""What torch's profilers show of communication: the same events on gloo and in the simulator, field by field."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

WATCHED = ("c10d::", "gloo:", "torch.distributed.ddp.reducer::search", "DistributedDataParallel")


def _events(found: Any) -> list[tuple[Any, ...]]:
    """The events of communication, and what an event says of itself besides times."""
    events = found.events() if isinstance(found, torch.profiler.profile) else found.function_events
    mark = next(event for event in events if event.name == "mark")
    shown = [
        (
            event.name,
            event.is_async,
            event.input_shapes,
            event.thread == mark.thread,
            event.scope,
            event.is_user_annotation,
            event.is_remote,
            str(event.device_type),
            event.count,
        )
        for event in events
        if event.name.startswith(WATCHED)
    ]
    beside = [row for row in shown if not row[3]]  # threads of gloo: they come when they come
    return [row for row in shown if row[3]] + sorted(beside, key=repr)


def _autograd(**how: bool) -> Callable[[], Any]:
    return lambda: torch.autograd.profiler.profile(**how)


PROFILERS = {
    "autograd": _autograd(),
    "with shapes": _autograd(record_shapes=True),
    "torch": lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True),
}


def _profiled(work: Callable[[], None]) -> dict[str, Any]:
    found = {}
    for name, profiler in PROFILERS.items():
        dist.barrier()
        with profiler() as profile:
            with torch.profiler.record_function("mark"):
                pass
            work()
        found[name] = _events(profile)
    return found


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    """Every collective once, asynchronous ones among them."""

    def many(*shape: int) -> list[Tensor]:
        return [torch.ones(shape) for _ in range(world_size)]

    def work() -> None:
        t = torch.ones(4, 3)
        dist.all_reduce(t)
        handle = dist.all_reduce(t, async_op=True)
        assert handle is not None
        handle.wait()
        dist.broadcast(t, 1)
        dist.reduce(t, 1)
        dist.all_gather(many(4, 3), t)
        dist.all_gather_into_tensor(torch.zeros(4 * world_size, 3), t)
        dist.gather(t, many(4, 3) if rank == 1 else None, 1)
        dist.scatter(t, many(4, 3) if rank == 1 else None, 1)
        dist.reduce_scatter_tensor(torch.zeros(1, 3), torch.ones(world_size, 3))
        dist.reduce_scatter(torch.zeros(2), many(2))
        dist.all_to_all_single(torch.zeros(world_size), torch.ones(world_size))
        dist.all_to_all(many(2), many(2))
        dist.all_reduce_coalesced([t, torch.ones(5)])
        dist.all_reduce(torch.eye(3).to_sparse())
        dist.barrier()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _profiled(work)


def data_parallel(rank: int, world_size: int) -> dict[str, Any]:
    """DDP's forward, its search for unused parameters, its reduction."""
    found = {}
    for search in (False, True):
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3), find_unused_parameters=search)

        def step(model: nn.Module = model) -> None:
            model(torch.ones(1, 3)).sum().backward()

        step()
        step()
        found[str(search)] = _profiled(step)
    return found


BODIES = [collectives, data_parallel]


@pytest.mark.parametrize("body", BODIES)
def test_profiled(conform: Conform, body: Any) -> None:
    """torch.autograd.profiler and torch.profiler show what they show on gloo."""
    conform(body)
