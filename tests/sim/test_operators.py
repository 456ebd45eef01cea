"""Operators that a program defines on every rank run that rank's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distsim.errors import RankFailure
from tests.sim.running import ranks


def own_body() -> tuple[float, float, float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @torch.library.custom_op("distsim_test::add_rank", mutates_args=(), schema="(Tensor x) -> Tensor")
    def add_rank(x: torch.Tensor) -> torch.Tensor:
        return x + rank

    add_rank.register_autograd(lambda ctx, grad: grad * (10 + rank))
    dist.barrier()
    x = torch.zeros(1, requires_grad=True)
    y = add_rank(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    called = torch.ops.distsim_test.add_rank(torch.zeros(1)).item()
    dist.barrier()
    return y.item(), called, x.grad.item()


def own_library() -> None:
    dist.init_process_group("gloo")
    torch.library.Library("distsim_test_library", "DEF")


def test_each_rank_runs_its_own_body() -> None:
    """All ranks have defined it before any calls it: forward and backward are still each rank's own."""
    assert ranks(own_body).results == [(0.0, 0.0, 10.0), (1.0, 1.0, 11.0)]


def test_a_second_library_is_refused_by_name() -> None:
    """torch would say something about TORCH_LIBRARY blocks that no rank of a real job hears."""
    with pytest.raises(RankFailure, match=r'Library\("distsim_test_library", "DEF"\) .* is not simulated'):
        ranks(own_library)
