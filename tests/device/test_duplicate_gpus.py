"""Two ranks of a node on one GPU, as where torch.cuda.set_device is forgotten: NCCL refuses it, simulated as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.debug.records.kinds import Kind
from distsim.errors import RankFailure

pytestmark = pytest.mark.filterwarnings("ignore:barrier")  # torch says that it has no device


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


def own() -> int:
    return int(os.environ["LOCAL_RANK"])


def ones(index: int | None = None) -> torch.Tensor:
    return torch.ones(4, device="cuda" if index is None else f"cuda:{index}")


def objects() -> None:
    """torch takes the current GPU for them, which is GPU 0 where nothing else was set."""
    dist.init_process_group("nccl")
    dist.all_reduce(ones(own()))
    dist.all_gather_object([None] * dist.get_world_size(), "me")


def barrier_then(mine: Callable[[], int | None], after_set: bool = False) -> Callable[[], float]:
    """A barrier without a device as the group's first call, then a sum on the GPU *mine*."""

    def body() -> float:
        dist.init_process_group("nccl")
        if after_set:
            torch.cuda.set_device(mine())
        dist.barrier()
        total = ones(mine())
        dist.all_reduce(total)
        dist.barrier()
        return float(total[0])

    return body


@pytest.mark.parametrize(
    ("body", "nodes", "size", "culprits"),
    [
        (objects, 1, 2, (1,)),
        (barrier_then(lambda: None), 1, 4, (1, 2, 3)),
        (barrier_then(own, after_set=True), 2, 4, (4, 5, 6, 7)),
        (barrier_then(lambda: 4 - own()), 1, 5, (0, 1, 3, 4)),
    ],
    ids=["objects", "barrier, all on GPU 0", "half of each node", "in reverse order"],
)
def test_a_second_gpu_of_some_members_is_told(body: Any, nodes: int, size: int, culprits: tuple[int, ...]) -> None:
    """NCCL connects it anew and waits for the others, who keep to theirs. A barrier without a device takes the rank
    modulo the number of GPUs, whatever torch.cuda.set_device has set."""
    (told,) = distsim.simulate(body, on=f"dgx-h100:{nodes}", nproc_per_node=size).diagnoses
    assert (told.kind, told.culprits, told.exit_code) == (Kind.DEVICE_MISMATCH, culprits, 4)
    assert "waits for ever" in told.explanation
    assert "device_id=torch.device('cuda', LOCAL_RANK)" in told.suggestion


@pytest.mark.parametrize(
    ("body", "nodes", "size"),
    [
        (barrier_then(own, after_set=True), 1, 4),
        (barrier_then(own, after_set=True), 2, 8),
        (barrier_then(lambda: 3 - own()), 1, 4),
    ],
    ids=["half of a node", "whole nodes", "in reverse order"],
)
def test_a_barrier_before_all_else_is_fine(body: Any, nodes: int, size: int) -> None:
    """Where the rank's guess is its GPU, or all ranks change to another."""
    outcome = distsim.simulate(body, on=f"dgx-h100:{nodes}", nproc_per_node=size)
    assert outcome.results == [float(nodes * size)] * (nodes * size)
    assert not outcome.diagnoses


def by_device_ids() -> None:
    torch.cuda.set_device(own())
    dist.init_process_group("nccl")
    dist.barrier(device_ids=[0])


def by_device_id() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))


def by_the_only_one() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    dist.init_process_group("nccl")
    dist.barrier()


@pytest.mark.parametrize("body", [by_device_ids, by_device_id, by_the_only_one])
def test_a_call_without_a_tensor_has_a_gpu_too(body: Any) -> None:
    """All ranks on one, by device_ids, by device_id or because they see no other."""
    with pytest.raises(RankFailure, match=r"Duplicate GPU detected : rank 1 and rank 0"):
        distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)


def test_a_tensor_on_another_gpu_than_the_groups() -> None:
    """What ProcessGroupNCCL says of a tensor that is not on the device of init_process_group."""

    def body() -> None:
        dist.init_process_group("nccl", device_id=torch.device("cuda", own()))
        dist.barrier()
        dist.all_reduce(ones(1 - own()))

    with pytest.raises(RankFailure, match=r"tensor not on device passed to init_process_group \(the tensor is on"):
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
