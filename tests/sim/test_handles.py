"""Handles of calls: how long they live, and what they keep alive."""

from __future__ import annotations

import gc
import sys
import weakref
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from sim.running import ranks


def test_what_a_call_moved_is_free_once_it_was_waited_for() -> None:
    """Inputs, outputs, handles and futures of completed calls go when the program drops them, without the collector."""

    def body() -> list[bool]:
        dist.init_process_group("gloo")
        seen: list[weakref.ref[Any]] = []

        def call(async_op: bool) -> None:
            tensor, parts = torch.ones(8), [torch.ones(8) for _ in range(2)]
            handles = [dist.all_reduce(tensor, async_op=async_op), dist.all_gather(parts, tensor, async_op=async_op)]
            other = 1 - dist.get_rank()
            handles += dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, parts[0], other)]
            )
            for handle in filter(None, handles):
                handle.wait()
            future = dist.all_reduce(tensor, async_op=True).get_future()
            future.wait()
            seen.extend(weakref.ref(thing) for thing in (tensor, *parts, *filter(None, handles), future))

        for async_op in (True, False):
            call(async_op)
        last = torch.ones(8)
        dist.broadcast(last, 0)
        seen.append(weakref.ref(last))
        del last
        return [ref() is not None for ref in seen]

    gc.collect()
    gc.disable()
    try:
        for alive in ranks(body).results:
            assert alive
            assert not any(alive)
    finally:
        gc.enable()


def test_a_handle_that_only_cpp_holds_outlives_the_collector() -> None:
    """A functional collective's handle lies in a registry of torch's until its tensor is waited for."""

    def body() -> float:
        dist.init_process_group("gloo")
        import torch.distributed._functional_collectives as functional

        total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        gc.collect()
        return float(total.sum())

    assert ranks(body).results == [8.0, 8.0]


def test_what_follows_from_a_future_comes_before_the_next_call() -> None:
    """A callback of a future that is long done changes what the next synchronous call sends."""

    def body() -> float:
        dist.init_process_group("gloo")
        total, gradient = torch.zeros(1), torch.ones(1)
        future = dist.all_reduce(gradient, async_op=True).get_future()
        future.then(lambda done: total.add_(done.value()[0]))
        for _ in range(50):
            torch.ones(1 << 16).exp_()
        dist.all_reduce(total)
        return float(total)

    assert ranks(body).results == [4.0, 4.0]


def test_a_call_inside_a_call_loses_neither() -> None:
    """Python code that runs between a group's method and its wait (a profile function here) makes a call, too."""

    def body() -> list[float]:
        dist.init_process_group("gloo")
        total, other = torch.ones(1), torch.ones(1)
        pending = [True]

        def seen(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code.co_qualname == "SimWork.wait" and pending:
                pending.clear()
                dist.broadcast(other, 0)

        sys.setprofile(seen)
        try:
            dist.all_reduce(total)
        finally:
            sys.setprofile(None)
        dist.barrier()
        return [float(total), float(other), float(len(pending))]

    assert ranks(body).results == [[2.0, 1.0, 0.0]] * 2


def test_members_share_what_is_as_large_as_their_group() -> None:
    """torch's map from global to group ranks is one for all members of a group, not one for each."""

    def body() -> list[int]:
        dist.init_process_group("gloo")
        half = dist.new_group([0, 1])
        of = dist.distributed_c10d._world.pg_group_ranks
        assert dist.group.WORLD is not None
        assert of[dist.group.WORLD] == {rank: rank for rank in range(4)}
        return [id(of[dist.group.WORLD]), id(of[half]) if dist.get_rank() < 2 else 0]

    results = ranks(body, 4).results
    assert len({world for world, _ in results}) == 1
    assert results[0][1] == results[1][1] != results[0][0]
