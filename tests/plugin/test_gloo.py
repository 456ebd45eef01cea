"""The real arm of the plugin: processes on gloo, forked from pytest's own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

TEXT = """
import os
import pytest, torch
import torch.distributed as dist

@pytest.mark.world_size(2, on=["gloo", "sim"])
def test_both(rank, world, tmp_path):
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    assert t.item() == 1 and tmp_path.is_dir()

@pytest.mark.world_size(2, on="gloo")
def test_assert(rank):
    print("line of", rank)
    assert rank == 0

@pytest.mark.world_size(3, on="gloo", timeout_s=30)
def test_hang(rank):
    if rank != 2:
        dist.barrier()

@pytest.mark.world_size(2, on="gloo", timeout_s=30)
def test_killed(rank):
    if rank:
        os.kill(os.getpid(), 9)
    dist.barrier()

@pytest.mark.world_size(2, on="gloo", timeout_s=8)
def test_spins(rank):
    while rank:
        pass
    dist.barrier()
"""


def test_real_ranks_are_judged_like_simulated_ones(pytester: pytest.Pytester) -> None:
    """Assertions with introspection, hangs and deaths with the report, nothing left running."""
    pytester.makepyfile(TEXT)
    result = pytester.runpytest_subprocess("-p", "distsim.pytest_plugin", "-p", "no:cacheprovider", "-v")
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "*rank 1: AssertionError: assert 1 == 0*",
            "*rank 1 of 2 on gloo*",
            "[[]1] line of 1",
            "HANG  missing rank  rank 2  barrier #1*",
            "HANG  rank killed  rank 1*",
            "HANG  *  rank 1*",
        ]
    )
