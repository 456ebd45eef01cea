"""Row 10: Work and its futures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of


def methods(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = torch.tensor([float(rank)])
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    found["is Work"] = isinstance(work, dist.Work)
    found["wait"] = work.wait()
    found["again"] = work.wait()
    found["t"] = t
    found["completed"] = work.is_completed()
    found["success"] = work.is_success()
    if torch.__version__ >= "2.13":  # before, its answer had no type in Python
        found["exception"] = work.exception()
    found["synchronize"] = error_of(work.synchronize)
    found["result"] = error_of(work.result)
    found["source_rank"] = error_of(work.source_rank)
    found["wait with timeout"] = work.wait(timedelta(seconds=5))
    found["wait with number"] = error_of(work.wait, 5)
    found["future result"] = error_of(lambda: work.get_future_result())
    return found


def before_the_others(rank: int, world_size: int) -> dict[str, Any]:
    """A call cannot be complete before the last member made it."""
    found: dict[str, Any] = {}
    other = dist.new_group()
    t = torch.tensor([float(rank)])
    if rank == 0:
        work = dist.all_reduce(t, async_op=True)
        assert work is not None
        found["early"] = work.is_completed()
        dist.barrier(other)
        work.wait()
        found["late"] = work.is_completed()
    else:
        dist.barrier(other)
        dist.all_reduce(t)
    found["t"] = t
    return found


def future(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = torch.tensor([1.0, 2.0])
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    fut = work.get_future()
    found["future type"] = isinstance(fut, torch._C.Future)
    value = fut.wait()
    found["value"] = value
    found["done"] = fut.done()
    found["again"] = fut.value()
    work.wait()
    # Chained: the callback runs when the bytes are there.
    t = torch.tensor([1.0, 2.0])
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    half = work.get_future().then(lambda f: [x / 2 for x in f.value()])
    found["then"] = half.wait()
    chain = half.then(lambda f: f.value()[0] + 1).then(lambda f: f.value() * 10)
    found["chain"] = chain.wait()
    found["wait_all"] = [v[0] for v in torch.futures.wait_all([half, work.get_future()])]
    collected = torch.futures.collect_all([half, chain]).wait()
    found["collect_all"] = [f.value() for f in collected]
    failing = half.then(lambda f: 1 // 0)
    found["raises"] = error_of(failing.wait)
    called: list[int] = []
    half.add_done_callback(lambda f: called.append(1))
    found["callback"] = called
    return found


def futures_of_all(rank: int, world_size: int) -> dict[str, Any]:
    """Which calls give a future, and what it holds."""
    found: dict[str, Any] = {}
    t = torch.tensor([float(rank)])
    out = [torch.zeros(1) for _ in range(world_size)]
    flat = torch.zeros(world_size)
    works = {
        "broadcast": dist.broadcast(t.clone(), 1, async_op=True),
        "all_gather": dist.all_gather(out, t, async_op=True),
        "all_gather_into_tensor": dist.all_gather_into_tensor(flat, t, async_op=True),
        "all_to_all_single": dist.all_to_all_single(torch.zeros(4), torch.ones(4), async_op=True),
        "reduce": dist.reduce(t.clone(), 0, async_op=True),
        "scatter": dist.scatter(torch.zeros(1), [torch.ones(1)] * world_size if rank == 0 else None, async_op=True),
        "gather": dist.gather(t, [torch.zeros(1) for _ in range(world_size)] if rank == 0 else None, async_op=True),
        "barrier": dist.barrier(async_op=True),
    }
    for name, work in works.items():
        assert work is not None
        found[f"{name} wait"] = work.wait()
        found[f"{name} completed"] = work.is_completed()
        found[f"{name} future"] = error_of(work.get_future)
    found["gathered"] = out
    found["flat"] = flat
    return found


def timeouts(rank: int, world_size: int) -> dict[str, Any]:
    """wait(timeout) on a call that one rank makes late."""
    found: dict[str, Any] = {"rank": rank}
    group = dist.new_group()
    control = dist.new_group()
    t = torch.tensor([1.0])
    if rank != 3:
        work = dist.all_reduce(t, group=group, async_op=True)
        assert work is not None
        found["short"] = error_of(work.wait, timedelta(milliseconds=100))
    dist.barrier(control)
    return found


def group_timeout(rank: int, world_size: int) -> dict[str, Any]:
    """The group's own timeout: a collective that one rank never makes."""
    found: dict[str, Any] = {"rank": rank}
    group = dist.new_group(timeout=timedelta(milliseconds=500))
    if rank != 3:
        found["all_reduce"] = error_of(dist.all_reduce, torch.ones(1), group=group)
    dist.barrier()
    return found


BODIES = [
    methods,
    before_the_others,
    future,
    futures_of_all,
    timeouts,
    group_timeout,
]


@pytest.mark.parametrize("body", BODIES)
def test_work(conform: Conform, body: Any) -> None:
    """Handles of asynchronous calls answer what gloo's answer."""
    conform(body)


def kept_for_the_handle(rank: int, world_size: int) -> dict[str, Any]:
    """What gloo refuses in its own thread an asynchronous call's handle says, and 8 bits are refused, not a crash."""
    found: dict[str, Any] = {}
    for dtype in (torch.float8_e5m2, torch.int16):
        t = torch.ones(4).to(dtype)
        for name, call in (("broadcast", lambda t: dist.broadcast(t, 0, async_op=True)), ("send", None)):
            if call is None:
                work = dist.isend(t, (rank + 1) % world_size)
                got = torch.zeros(4).to(dtype)
                dist.recv(got, (rank - 1) % world_size)
                work.wait()
                found[f"{dtype} sent"] = got.float()
                continue
            work = call(t)
            found[f"{dtype} {name}"] = error_of(work.wait)
            found[f"{dtype} {name} success"] = work.is_success()
    return found


def scattered(rank: int, world_size: int) -> dict[str, Any]:
    """A reduce_scatter's handle can be waited for, and no more."""
    work = dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(world_size), async_op=True)
    assert work is not None
    return {
        "wait": work.wait(),
        "completed": work.is_completed(),
        "future": error_of(work.get_future),
        "result": error_of(work.result),
    }


@pytest.mark.parametrize("body", [kept_for_the_handle, scattered])
def test_what_gloo_finds_late(conform: Conform, body: Any) -> None:
    """Handles of refused calls and of reduce_scatters say what gloo's say."""
    conform(body)


def bytes_and_elements(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = torch.tensor([True, rank == 1])
    dist.all_reduce(t)
    found["bytes of bools"] = t.view(torch.uint8)
    t, out = torch.arange(12.0).reshape(6, 2) + 100 * rank, torch.zeros(6, 2)
    found["by elements"] = [error_of(dist.all_to_all_single, out, t), out]  # torch 2.14 refuses it
    sparse = torch.eye(2).to_sparse()
    found["sparse"] = error_of(dist.all_reduce, sparse, dist.ReduceOp.MAX)
    found["sparse gather"] = error_of(dist.all_to_all, [sparse] * world_size, [sparse] * world_size)
    found["empty from anybody"] = error_of(dist.irecv, torch.zeros(0))
    return found


def test_bytes_and_elements(conform: Conform) -> None:
    """Bools are added up as bytes, rows that do not divide go by elements, sparse tensors only as sums."""
    conform(bytes_and_elements)
