"""Names of torch.distributed's that no other row calls: each does on sim what it does on gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform, Place, own_init
from conformance.plain import error_of, mine, says

OPTIONS = {
    "AllToAllOptions": dist.AllToAllOptions,
    "AllreduceCoalescedOptions": dist.AllreduceCoalescedOptions,
    "AllreduceOptions": dist.AllreduceOptions,
    "BarrierOptions": dist.BarrierOptions,
    "BroadcastOptions": dist.BroadcastOptions,
    "GatherOptions": dist.GatherOptions,
    "ReduceOptions": dist.ReduceOptions,
    "ReduceScatterOptions": dist.ReduceScatterOptions,
    "ScatterOptions": dist.ScatterOptions,
}


def by_options(rank: int, world_size: int) -> dict[str, Any]:
    """Calls of the group itself, with the option classes that torch's own functions fill in."""
    group = dist.distributed_c10d._get_default_group()
    found: dict[str, Any] = {name: sorted(n for n in dir(kind()) if n[0] != "_") for name, kind in OPTIONS.items()}
    t = mine(rank, 3)
    reduce = dist.AllreduceOptions()
    reduce.reduceOp = dist.ReduceOp.MAX
    group.allreduce([t], reduce).wait()
    found["all_reduce"] = t
    root = dist.BroadcastOptions()
    root.rootRank, root.rootTensor = 2, 0
    t = mine(rank, 3)
    group.broadcast([t], root).wait()
    found["broadcast"] = t
    to = dist.ReduceOptions()
    to.rootRank = 1
    t = mine(rank, 3)
    group.reduce([t], to).wait()
    found["reduce"] = t if rank == 1 else 0
    gather = dist.GatherOptions()
    gather.rootRank = 3
    parts = [torch.zeros(3) for _ in range(world_size)]
    group.gather([parts] if rank == 3 else [], [mine(rank, 3)], gather).wait()
    found["gather"] = parts
    scatter = dist.ScatterOptions()
    scatter.rootRank = 3
    t = torch.zeros(3)
    group.scatter([t], [parts] if rank == 3 else [], scatter).wait()
    found["scatter"] = t
    t = torch.zeros(3)
    group.reduce_scatter([t], [[mine(rank, 3) for _ in range(world_size)]], dist.ReduceScatterOptions()).wait()
    found["reduce_scatter"] = t
    group.barrier(dist.BarrierOptions()).wait()
    outs = [torch.zeros(1) for _ in range(world_size)]
    group.alltoall(outs, [mine(rank, 1) + i for i in range(world_size)], dist.AllToAllOptions()).wait()
    found["all_to_all"] = outs
    t = mine(rank, 2)
    group.allreduce_coalesced([t], dist.AllreduceCoalescedOptions()).wait()
    return found | {"coalesced": t}


def questions(rank: int, world_size: int) -> dict[str, Any]:
    """What torch was built with, and small things."""
    found: dict[str, Any] = {"ucc": dist.is_ucc_available(), "xccl": dist.is_xccl_available()}
    found["gloo"] = dist.is_gloo_available()
    found["nccl"] = isinstance(dist.is_nccl_available(), bool)  # a simulation has it
    found["mpi"] = isinstance(dist.is_mpi_available(), bool)
    found["timeout"] = dist.default_pg_timeout
    found["hooks"] = sorted(dist.BuiltinCommHookType.__members__)
    found["config"] = repr(dist.BackendConfig(dist.Backend("gloo")))
    found["complex"] = [dist.supports_complex(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]
    found["count"] = dist.get_pg_count()
    found["premul"] = says(dist._make_nccl_premul_sum, 2.0) if hasattr(dist, "_make_nccl_premul_sum") else ""
    found["operations"] = sorted(dist.ReduceOp.RedOpType.__members__)
    group: dist.GroupName = dist.distributed_c10d._get_default_group().group_name
    found["name"] = group
    found["kinds"] = [hasattr(dist, name) for name in ("GradBucket", "Logger", "Reducer", "ProcessGroupGloo")]
    if hasattr(dist, "all_gather_single"):  # from torch 2.13 on
        gathered = torch.zeros(2 * world_size)
        dist.all_gather_single(gathered, mine(rank, 2))
        share = torch.zeros(2)
        dist.reduce_scatter_single(share, gathered)
        found["single"] = [gathered, share]
    found["shrink"] = error_of(dist.shrink_group, [0])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    found["boxed"] = says(lambda: type(work.boxed()).__name__)
    found["unboxed"] = says(lambda: type(dist.Work.unbox(work.boxed())).__name__ != "")
    found["stream"] = says(work.block_current_stream)
    with dist.record_comm("mine"):
        t = mine(rank, 2)
        dist.all_reduce(t)
    found["named"] = t
    found["factor"] = says(lambda: dist.ReduceOp(dist.ReduceOp.SUM).factor)
    found["break"] = says(dist.breakpoint, 0, skip=3)  # of the first three it takes no notice
    group_store = dist.distributed_c10d._get_default_store()
    group_store.barrier("all", world_size)
    return found


@own_init
def meets(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """`rendezvous`, and one of the program's own kind."""
    found: dict[str, Any] = {}
    url = f"file://{place.directory}/by-hand?rank={rank}&world_size={world_size}"
    store, at, size = next(dist.rendezvous(url))
    store.set(f"k{rank}", "v")
    store.wait([f"k{i}" for i in range(world_size)], timedelta(seconds=20))
    found["by hand"] = [at, size]

    def handler(url: str, **kwargs: Any) -> Iterator[Any]:
        yield dist.FileStore(f"{place.directory}/own", world_size), rank, world_size

    with contextlib.suppress(RuntimeError):  # of ranks in one process another has
        dist.register_rendezvous_handler(f"own{rank}", handler)
    found["again"] = error_of(dist.register_rendezvous_handler, f"own{rank}", handler)
    dist.init_process_group("gloo", init_method=f"own{rank}://")
    t = mine(rank, 2)
    dist.all_reduce(t)
    dist.destroy_process_group()
    keys = dist.TCPStore(os.environ["MASTER_ADDR"], place.ports[0], world_size, rank == 0)
    keys.set(f"k{rank}", "1")
    keys.wait([f"k{i}" for i in range(world_size)], timedelta(seconds=20))
    found["keys"] = sorted(key for key in keys.list_keys() if "k" in key)
    keys.add("left", 1)
    while rank == 0 and keys.add("left", 0) < world_size:
        pass
    return found | {"sum": t}


@pytest.mark.parametrize("body", [by_options, questions, meets])
def test_names(conform: Conform, body: Any) -> None:
    """The same on both arms."""
    conform(body)
