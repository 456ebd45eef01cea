"""The backend table: what "nccl" and "mpi" answer on CPU tensors, in a simulation.

There is no NCCL and no MPI here to compare with: the expectations are torch's documented table
(https://docs.pytorch.org/docs/stable/distributed.html#backends) and its source.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Place, own_init, sim
from conformance.plain import error_of

import distsim


@own_init
def names(rank: int, world_size: int, place: Place, backend: str) -> dict[str, Any]:
    dist.init_process_group(backend)
    found = {
        "backend": dist.get_backend(),
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "group": dist.get_backend(dist.new_group()),
        "other": dist.get_backend(dist.new_group(backend="gloo")),
    }
    dist.destroy_process_group()
    return found


@own_init
def nccl(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """NCCL has nothing for CPU tensors; a gloo group beside it has."""
    dist.init_process_group("nccl")
    t = torch.ones(4)
    out = [torch.zeros(4) for _ in range(world_size)]
    found: dict[str, Any] = {
        "all_reduce": error_of(dist.all_reduce, t),
        "broadcast": error_of(dist.broadcast, t, 0),
        "all_gather": error_of(dist.all_gather, out, t),
        "all_to_all_single": error_of(dist.all_to_all_single, torch.zeros(4), t),
        "send": error_of(dist.send, t, (rank + 1) % world_size),
        "monitored_barrier": error_of(dist.monitored_barrier),
    }
    beside = dist.new_group(backend="gloo")
    dist.all_reduce(t, group=beside)
    found["beside"] = t
    dist.destroy_process_group()
    return found


@own_init
def both(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """ "cpu:gloo,cuda:nccl" serves CPU tensors, and so does no backend at all."""
    found: dict[str, Any] = {}
    for i, backend in enumerate(("cpu:gloo,cuda:nccl", None)):
        method = f"file://{place.directory}/{i}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=world_size)
        t = torch.ones(2)
        dist.all_reduce(t)
        found[str(backend)] = t
        found[f"{backend} name"] = dist.get_backend()
        dist.destroy_process_group()
    return found


@own_init
def mpi(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    dist.init_process_group("mpi")
    t = torch.ones(4)
    dist.all_reduce(t)
    dist.barrier()
    found: dict[str, Any] = {"all_reduce": t}
    heard = torch.zeros(1)
    if rank == 0:
        dist.send(torch.tensor([5.0]), 1, tag=3)
    elif rank == 1:
        found["recv"] = dist.recv(heard, tag=3)
        found["heard"] = heard
    found["reduced"] = torch.ones(1)
    dist.all_reduce(found["reduced"], dist.ReduceOp.PRODUCT)
    found["band"] = error_of(dist.all_reduce, torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND)
    found["avg"] = error_of(dist.all_reduce, torch.ones(1), dist.ReduceOp.AVG)
    found["bfloat16"] = error_of(dist.all_reduce, torch.ones(1, dtype=torch.bfloat16))
    dist.destroy_process_group()
    return found


@own_init
def unknown(rank: int, world_size: int, place: Place, *backends: str) -> dict[str, str]:
    found = {}
    for backend in backends:
        with pytest.raises(AssertionError, match="Unknown") as raised:
            dist.init_process_group(backend)
        found[backend] = str(raised.value)
    return found


UNKNOWN = {
    "foo": "Unknown backend type foo. Use gloo, nccl or mpi, or register it by Backend.register_backend.",
    "cpu:gloo,cuda:ncll": "Unknown backend type ncll. Use nccl.",
    "gloo,nccl": "Unknown backend type gloo,nccl. Give each device its backend, as in cpu:gloo,cuda:nccl.",
}
NEWER = ("nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl2")
"""Names of torch 2.14 and later."""


def test_an_unknown_backend_is_one_line_with_a_remedy() -> None:
    """torch's kind of error; a name of a later release says which."""
    newer = NEWER if torch.__version__ < "2.14" else ()
    for found in sim(unknown, *UNKNOWN, *newer):
        for name in newer:
            kind = name.rpartition(":")[2]
            assert found.pop(name) == (
                f"Unknown backend type {kind}. Torch 2.14 and later have it, and this is torch {torch.__version__}. "
                "Use nccl."
            )
        assert found == UNKNOWN


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch has no such backends")
@pytest.mark.parametrize("backend", NEWER)
def test_the_kinds_of_nccl_are_simulated(backend: str) -> None:
    """On GPUs, for the job's group and for one that is made later."""

    def main() -> tuple[str, str]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
        for group in (dist.group.WORLD, dist.new_group(backend=backend)):
            dist.all_reduce(torch.ones(2, device="cuda"), group=group)
        return dist.get_backend(), dist.get_backend(group)

    assert distsim.simulate(main, on="dgx-h100:1", nproc_per_node=2).results == [(backend, backend)] * 2


@pytest.mark.parametrize("backend", ["nccl", "mpi", "gloo"])
def test_get_backend_answers_what_was_asked_for(backend: str) -> None:
    """A script asks for a backend and is told that it has it."""
    for rank, found in enumerate(sim(names, backend)):
        assert found == {"backend": backend, "rank": rank, "world": 4, "group": backend, "other": "gloo"}


def test_nccl_refuses_cpu_tensors() -> None:
    """Every call with a CPU tensor on an NCCL group raises, and a gloo group beside it works."""
    for found in sim(nccl):
        assert found.pop("beside")["values"] == [4.0] * 4
        assert found.pop("monitored_barrier") in ("RuntimeError", "ValueError")
        assert set(found.values()) == {"RuntimeError"}, found


def test_cpu_tensors_beside_cuda() -> None:
    """A mixed backend, and none, serve CPU tensors."""
    for found in sim(both):
        assert found["cpu:gloo,cuda:nccl"]["values"] == [4.0, 4.0]
        assert found["cpu:gloo,cuda:nccl name"] == "cpu:gloo,cuda:nccl"
        assert found["None"]["values"] == [4.0, 4.0]


def test_mpi_has_its_column_of_the_table() -> None:
    """MPI on CPU tensors: point to point with tags; SUM, PRODUCT, MIN and MAX only, and no halves.

    ProcessGroupMPI.cpp maps those four operations, and the dtypes uint8 to int64, float32 and float64.
    """
    answers = sim(mpi)
    for found in answers:
        assert found["all_reduce"]["values"] == [4.0] * 4
        assert found["reduced"]["values"] == [1.0]
        assert found["band"] != "none"
        assert found["avg"] != "none"
        assert found["bfloat16"] != "none"
    assert answers[1]["recv"] == 0
    assert answers[1]["heard"]["values"] == [5.0]
