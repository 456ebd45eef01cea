"""Two ranks of a node on one GPU, as where torch.cuda.set_device is forgotten: NCCL refuses it, simulated as well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.errors import RankFailure


def _all_reduce(backend: str = "nccl") -> Any:
    dist.init_process_group(backend)
    here = torch.ones(4).cuda()
    dist.all_reduce(here)
    return here.tolist()


@pytest.mark.parametrize(("on", "nproc"), [("dgx-h100:1", 2), ("dgx-h100:1", 8), ("dgx-h100:4", 8)])
def test_two_ranks_of_a_node_on_one_gpu(on: str, nproc: int) -> None:
    """Also where one rank is traced for many, of other nodes: a hundred are not started for it."""
    with pytest.raises(RankFailure, match=r"Duplicate GPU detected : rank . and rank . both on CUDA device") as failed:
        distsim.simulate(_all_reduce, on=on, nproc_per_node=nproc)
    assert "torch.cuda.set_device(LOCAL_RANK)" in str(failed.value)


def test_objects_that_are_gathered_on_anothers_gpu() -> None:
    """torch takes the current GPU for them, which is GPU 0 where nothing else was set."""

    def body() -> None:
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(4, device=f"cuda:{dist.get_rank()}"))
        dist.all_gather_object([None, None], "me")

    with pytest.raises(RankFailure, match=r"Duplicate GPU detected : rank 1 and rank 0"):
        distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)


def test_one_gpu_on_each_of_several_nodes() -> None:
    """Which have the same number."""
    assert distsim.simulate(_all_reduce, on="dgx-h100:4", nproc_per_node=1).results == [[4.0] * 4] * 4


def test_gloo_minds_no_gpu_twice() -> None:
    """It copies over the host."""
    assert distsim.simulate(_all_reduce, args=("gloo",), on="dgx-h100:1", nproc_per_node=2).results == [[2.0] * 4] * 2


def test_a_process_that_sees_one_gpu_has_its_own(tmp_path: Path) -> None:
    """Its number 0 is another one's in each process."""

    def body() -> Any:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
        return _all_reduce()

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).results == [[2.0] * 4] * 2


def test_groups_are_looked_at_one_by_one() -> None:
    """A second group with the same GPUs, and ranks that change to another GPU of their own, are fine."""

    def body() -> float:
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        for group in (None, dist.new_group(), dist.new_group()):
            dist.all_reduce(torch.ones(4, device=f"cuda:{rank}"), group=group)
        last = torch.ones(4, device=f"cuda:{rank}")
        dist.all_reduce(last)
        return float(last[0])

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=4).results == [4.0] * 4


def test_a_gpu_that_is_only_touched_is_none_that_is_worked_on() -> None:
    """torch.ones(1, device="cuda") is GPU 0's in every process: the job trains on two GPUs, not on three. One that
    spreads its work has as many as it uses."""

    def body(spread: bool) -> None:
        own = f"cuda:{os.environ['LOCAL_RANK']}"
        for device in [own] if not spread else [own, f"cuda:{int(os.environ['LOCAL_RANK']) + 2}"]:
            weight = torch.ones(4096, 4096, device=device)
            for _ in range(20):
                weight = weight @ weight
        torch.ones(1, device="cuda")

    for spread, gpus in ((False, 2), (True, 4)):
        outcome = distsim.simulate(body, args=(spread,), on="dgx-h100:1", nproc_per_node=2)
        assert outcome.training is not None
        assert outcome.training.num_gpus == gpus


def test_a_step_is_that_of_the_parameters_gpu() -> None:
    """Whatever the current GPU is."""

    def body() -> None:
        weight = torch.ones(4096, 4096, device=f"cuda:{os.environ['LOCAL_RANK']}", requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        for _ in range(4):
            (weight @ weight).sum().backward()
            optimizer.step()

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    first, second = outcome.training.ranks
    assert second.compute_s == pytest.approx(first.compute_s, rel=0.05)
