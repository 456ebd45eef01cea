"""Buffers of collectives on GPUs that a kernel uses while nothing keeps it off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim


def elsewhere(x: torch.Tensor, work: Any) -> None:
    x[:8].mul_(2)


def in_another_stream(x: torch.Tensor, work: Any) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        x.mul_(2)


def waits(x: torch.Tensor, work: Any) -> None:
    work.wait()
    x.mul_(2)


def waits_by_a_stream(x: torch.Tensor, work: Any) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work.wait()
    torch.cuda.current_stream().wait_stream(side)
    x.mul_(2)


def synchronizes(x: torch.Tensor, work: Any) -> None:
    torch.cuda.synchronize()
    x.mul_(2)


def waits_for_its_future(x: torch.Tensor, work: Any) -> None:
    work.get_future().wait()
    x.mul_(2)


def writes_beside_it(x: torch.Tensor, work: Any) -> None:
    work.wait()
    again = dist.all_reduce(x[8:], async_op=True)
    x[:8].mul_(2)
    assert again is not None
    again.wait()


def reads_in_another_stream(x: torch.Tensor, work: Any) -> None:
    work.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.norm()


def reads_behind_a_wait(x: torch.Tensor, work: Any) -> None:
    work.wait()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.norm()


def asks_for_its_shape(x: torch.Tensor, work: Any) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.zeros_like(x).view(-1)
        x.view(2, -1)
    work.wait()


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (lambda x, work: x.mul_(2), True),
        (elsewhere, True),
        (in_another_stream, True),
        (reads_in_another_stream, True),
        (reads_behind_a_wait, False),
        (asks_for_its_shape, False),
        (waits, False),
        (waits_by_a_stream, False),
        (synchronizes, False),
        (waits_for_its_future, False),
        (writes_beside_it, False),
    ],
    ids=[
        "at_once",
        "part",
        "stream",
        "read",
        "read_behind",
        "shape",
        "wait",
        "by_a_stream",
        "synchronize",
        "future",
        "beside",
    ],
)
def test_a_write_that_races_with_a_collective_is_told(then: Callable[[torch.Tensor, Any], Any], told: bool) -> None:
    """It is a warning that ends nothing; whoever waited, in whatever way, hears nothing."""

    def body() -> str:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        x = torch.empty(1 << 22, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        then(x, work)
        assert work is not None
        work.wait()
        return "ended"

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    assert (outcome.results, outcome.exit_code) == (["ended"] * 2, 0)
    assert [str(found.kind) for found in outcome.diagnoses] == ["buffer_modified_in_flight"] * told


def test_a_race_of_streams_shows_both_lines_and_its_cure() -> None:
    """Who waited on one stream and reads on another is told of wait_stream(), the kernel's line and the call's."""

    def body() -> None:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        x = torch.empty(1 << 22, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        reads_in_another_stream(x, work)

    (d,) = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).diagnoses
    assert d.suggestion.startswith("Call wait_stream() on that stream, too")
    first = reads_in_another_stream.__code__.co_firstlineno
    assert {site.line for site in d.sites.values()} == {first + 3}
    assert [site.line for site in d.causes] == [body.__code__.co_firstlineno + 4]
