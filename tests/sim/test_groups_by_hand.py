"""torch's own ways round init_process_group, and what torch compiles or loads inside a rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import Scripts, ranks

from distsim.errors import NotSimulated, RankFailure


@pytest.mark.parametrize("name", ["ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"])
def test_a_group_made_by_hand_is_refused(name: str) -> None:
    """A real group would wait in C++ with the baton."""
    if not hasattr(dist, name):
        pytest.skip(f"this torch has no {name}")

    def body() -> None:
        with pytest.raises(NotSimulated, match=rf"{name}\(store, rank, size\) made by hand.*new_group"):
            getattr(dist, name)(dist.HashStore(), int(os.environ["RANK"]), 2)

    assert ranks(body).exit_code == 0


def test_a_group_makes_gloos_devices() -> None:
    """`create_device` is asked of a group, too."""

    def body() -> str:
        dist.init_process_group("gloo")
        group = dist.distributed_c10d._get_default_group()
        return type(group.create_device(interface="lo")).__name__

    assert ranks(body).results == ["Device", "Device"]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_StoreCollectives"), reason="torch has dropped them (2.14)"
)
def test_control_collectives_on_a_store() -> None:
    """C++ collectives over a store wait in the store, which is ours."""

    def body() -> list[Any]:
        rank, limit = int(os.environ["RANK"]), timedelta(seconds=20)
        store = dist.TCPStore("node0", 29_556, 2, is_master=rank == 0)
        control = torch._C._distributed_c10d._StoreCollectives(store, rank, 2)
        control.barrier("first", limit, True)
        if rank == 0:
            control.broadcast_send("word", "yes", limit)
        else:
            assert control.broadcast_recv("word", limit) == b"yes"
        return [control.all_gather("all", str(rank), limit), control.all_sum("sum", rank + 1, limit)]

    assert ranks(body).results == [[[b"0", b"1"], 3]] * 2


SPAWNED = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, os
def body(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29599")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from torch.distributed.tensor import distribute_tensor, Shard, init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    t = distribute_tensor(torch.arange(8.).reshape(4, 2), mesh, [Shard(0)])
    torch.save(t, f"FOLDER/{rank}.pt")
    y = torch.load(f"FOLDER/{rank}.pt")
    print((y + t).full_tensor().sum().item(), y.device_mesh == mesh)
if __name__ == "__main__":
    mp.spawn(body, nprocs=2)
"""


def test_distributed_tensors_are_loaded(script: Scripts) -> None:
    """A DTensor saved and loaded by spawned ranks has the mesh of its rank."""
    ran = script(SPAWNED.replace("FOLDER", str(script.folder)))
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert [ran.of(rank) for rank in (0, 1)] == [["56.0 True"]] * 2


def test_a_rank_that_the_world_has_not_is_refused_as_gloo_does() -> None:
    """Rank 7 of 3 raises in its own init_process_group; the others only wait for rank 1."""

    def body() -> None:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=7 if rank == 1 else rank, world_size=3, timeout=timedelta(seconds=20))

    with pytest.raises(RankFailure, match=r"(?s)Rank 1 raised RuntimeError.*rank < size\. 7 vs 3"):
        ranks(body, 3)
