"""Row 6: collectives, over dtypes, layouts and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import ALL_DTYPES, error_of, mine, says


def broadcast(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for root in range(world_size):
        t = mine(rank, 2, 3)
        found[f"returns {root}"] = dist.broadcast(t, root)
        found[f"from {root}"] = t
    t = mine(rank, 2)
    work = dist.broadcast(t, src=1, async_op=True)
    assert work is not None
    found["wait"] = work.wait()
    found["async"] = t
    t = mine(rank, 2)
    dist.broadcast(t, group_src=3)
    found["group_src"] = t
    for dtype in ALL_DTYPES:
        t = mine(rank, 3, dtype=dtype)
        found[f"{dtype} error"] = error_of(dist.broadcast, t, 2)
        found[f"{dtype}"] = t
    empty = torch.empty(0)
    dist.broadcast(empty, 0)
    scalar = torch.tensor(float(rank))
    dist.broadcast(scalar, 2)
    found |= {"empty": empty, "scalar": scalar}
    columns = mine(rank, 3, 2).t()
    found["columns error"] = error_of(dist.broadcast, columns, 0)
    found["columns"] = columns
    leaf = mine(rank, 2).requires_grad_()
    found["leaf error"] = error_of(dist.broadcast, leaf, 0)
    found["leaf"] = leaf
    found["no source"] = says(dist.broadcast, t)
    found["two sources"] = says(dist.broadcast, t, 0, group_src=0)
    return found


def all_reduce(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = mine(rank, 2, 3)
    found["returns"] = dist.all_reduce(t)
    found["sum"] = t
    for dtype in ALL_DTYPES:
        t = mine(rank, 3, dtype=dtype)
        found[f"{dtype} error"] = error_of(dist.all_reduce, t)
        found[f"{dtype}"] = t
    t = mine(rank, 4)
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    work.wait()
    found["async"] = t
    empty, scalar = torch.empty(0), torch.tensor(rank)
    dist.all_reduce(empty)
    dist.all_reduce(scalar)
    found |= {"empty": empty, "scalar": scalar}
    base = mine(rank, 4, 4)
    found["row error"] = error_of(dist.all_reduce, base[1])
    found["columns error"] = error_of(dist.all_reduce, base.t())
    found["base"] = base
    leaf = mine(rank, 2).requires_grad_()
    found["leaf error"] = error_of(dist.all_reduce, leaf)
    found["leaf"] = leaf
    fraction = torch.tensor([0.1, 0.2, 1e-3]) * (rank + 1)
    dist.all_reduce(fraction)
    found["fraction"] = fraction
    special = torch.tensor([float("inf"), float("nan") if rank == 1 else 1.0, -0.0])
    dist.all_reduce(special)
    found["special"] = special
    large = torch.ones(100_000, dtype=torch.int64) * (rank + 1)
    dist.all_reduce(large)
    found["large"] = [int(large.sum()), int(large[0]), int(large[-1])]
    found["list"] = error_of(dist.all_reduce, [t])
    found["none"] = error_of(dist.all_reduce, None)
    found["sparse"] = error_of(dist.all_reduce, torch.eye(2).to_sparse())
    return found


def sparse_all_reduce(rank: int, world_size: int) -> dict[str, Any]:
    t = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.tensor([1.0, 2.0 + rank]), (5,))
    dist.all_reduce(t)
    return {"dense": t.to_dense()}


def reduce(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for root in range(world_size):
        t = mine(rank, 3)
        found[f"returns {root}"] = dist.reduce(t, root)
        # What is left in the tensors of the others is torch's own affair.
        found[f"at {root}"] = t if rank == root else None
    t = mine(rank, 3, dtype=torch.int64)
    work = dist.reduce(t, dst=2, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    found["max"] = t if rank == 2 else None
    t = mine(rank, 2)
    dist.reduce(t, group_dst=1)
    found["group_dst"] = t if rank == 1 else None
    empty = torch.empty(0)
    dist.reduce(empty, 0)
    found["empty"] = empty
    for dtype in ALL_DTYPES:
        t = mine(rank, 3, dtype=dtype)
        found[f"{dtype} error"] = error_of(dist.reduce, t, 0)
        found[f"{dtype}"] = t if rank == 0 else None
    found["no target"] = says(dist.reduce, t)
    return found


def reduce_scatter(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = torch.zeros(2)
    parts = [torch.full((2,), float(rank * 10 + i)) for i in range(world_size)]
    found["error"] = says(dist.reduce_scatter, t, parts)
    found["t"] = t
    t = torch.zeros(2).long()
    parts = [torch.full((2,), rank * 10 + i) for i in range(world_size)]
    found["max error"] = error_of(dist.reduce_scatter, t, parts, dist.ReduceOp.MAX)
    found["max"] = t
    for dtype in ALL_DTYPES:
        out = torch.zeros(2).to(dtype)
        found[f"{dtype} error"] = error_of(dist.reduce_scatter_tensor, out, mine(rank, 8, dtype=dtype))
        found[f"{dtype}"] = out
    out = torch.zeros(2, 3)
    found["tensor returns"] = dist.reduce_scatter_tensor(out, mine(rank, 8, 3))
    found["flat"] = out.clone()
    found["stacked error"] = error_of(dist.reduce_scatter_tensor, out, mine(rank, 4, 2, 3))
    found["stacked"] = out.clone()
    work = dist.reduce_scatter_tensor(out, mine(rank, 8, 3), async_op=True)
    assert work is not None
    work.wait()
    found["async"] = out
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        out = torch.zeros(1)
        reduce_op = getattr(dist.ReduceOp, op)
        found[f"{op} error"] = error_of(dist.reduce_scatter_tensor, out, mine(rank, 4) + 1, reduce_op)
        found[op] = out
    out = torch.zeros(1)
    found["_reduce_scatter_base"] = error_of(dist._reduce_scatter_base, out, mine(rank, 4))
    found["base"] = out
    out = torch.empty(0)
    found["empty"] = error_of(dist.reduce_scatter_tensor, out, torch.empty(0))
    out = torch.zeros(2)
    found["too small"] = error_of(dist.reduce_scatter_tensor, out, mine(rank, 7))
    found["other dtype"] = error_of(dist.reduce_scatter_tensor, out, mine(rank, 8, dtype=torch.int64))
    found["too few"] = error_of(dist.reduce_scatter, out, [torch.zeros(2)])
    return found


def barrier(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"returns": dist.barrier()}
    work = dist.barrier(async_op=True)
    assert work is not None
    found["wait"] = work.wait()
    found["completed"] = work.is_completed()
    found["device_ids"] = error_of(dist.barrier, device_ids=[0])
    found["bad device_ids"] = error_of(dist.barrier, device_ids=0)
    return found


def coalesced(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ts = [mine(rank, 2), mine(rank, 3) + 100]
    found["all_reduce"] = error_of(dist.all_reduce_coalesced, ts)
    found["reduced"] = ts
    ts = [mine(rank, 2), mine(rank, 1)]
    found["max"] = error_of(dist.all_reduce_coalesced, ts, dist.ReduceOp.MAX)
    found["maxed"] = ts
    found["mixed dtypes"] = error_of(dist.all_reduce_coalesced, [mine(rank, 2), mine(rank, 2).long()])
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(world_size)]
    found["all_gather"] = error_of(dist.all_gather_coalesced, lists, [mine(rank, 2), mine(rank, 1) + 0.5])
    found["gathered"] = lists
    return found


def coalescing_manager(rank: int, world_size: int) -> dict[str, Any]:
    """The context manager that torch's own libraries use."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    found: dict[str, Any] = {}
    a, b = mine(rank, 2), mine(rank, 3)

    def reduces() -> None:
        with _coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)

    found["all_reduce"] = error_of(reduces)
    found["a"], found["b"] = a, b
    x, y = torch.zeros(4), torch.zeros(8)

    def gathers() -> None:
        with _coalescing_manager(async_ops=True) as manager:
            dist.all_gather_into_tensor(x, mine(rank, 1))
            dist.all_gather_into_tensor(y, mine(rank, 2))
        manager.wait()

    found["all_gather"] = error_of(gathers)
    found["x"], found["y"] = x, y
    u, v = torch.zeros(1), torch.zeros(2)

    def scatters() -> None:
        with _coalescing_manager():
            dist.reduce_scatter_tensor(u, mine(rank, 4))
            dist.reduce_scatter_tensor(v, mine(rank, 8))

    found["reduce_scatter"] = error_of(scatters)
    found["u"], found["v"] = u, v
    return found


def in_a_group(rank: int, world_size: int) -> dict[str, Any]:
    """The members 3 and 1, in torch's order; the others get nothing, and say so as torch does."""
    found: dict[str, Any] = {}
    group = dist.new_group([3, 1])
    inside = rank in (1, 3)
    t = mine(rank, 2)
    found["all_reduce"] = dist.all_reduce(t, group=group)
    found["reduced"] = t
    t = mine(rank, 2)
    found["broadcast"] = says(dist.broadcast, t, 3, group=group)
    found["broadcasted"] = t
    found["wrong root"] = error_of(dist.broadcast, t, 0, group=group)
    out: list[Any] | None = [torch.zeros(2), torch.zeros(2)]
    found["all_gather"] = says(dist.all_gather, out, mine(rank, 2), group=group)
    found["gathered"] = out
    flat = torch.zeros(4)
    found["into"] = says(dist.all_gather_into_tensor, flat, mine(rank, 2), group=group)
    found["flat"] = flat
    t = torch.zeros(1)
    found["reduce_scatter"] = says(dist.reduce_scatter_tensor, t, mine(rank, 2), group=group)
    found["scattered"] = t
    t = torch.zeros(2)
    found["all_to_all"] = says(dist.all_to_all_single, t, mine(rank, 2), group=group)
    found["exchanged"] = t
    t = mine(rank, 2)
    found["reduce"] = says(dist.reduce, t, 1, group=group)
    found["at 1"] = t if rank == 1 else None
    out = [torch.zeros(2), torch.zeros(2)] if rank == 1 else None
    found["gather"] = says(dist.gather, mine(rank, 2), out, 1, group=group)
    found["gathered at 1"] = out
    t = torch.zeros(1)
    parts = [torch.tensor([1.0]), torch.tensor([2.0])] if rank == 3 else None
    found["scatter"] = says(dist.scatter, t, parts, 3, group=group)
    found["from 3"] = t
    found["barrier"] = says(dist.barrier, group)
    work = dist.all_reduce(t.clone(), group=group, async_op=True)
    found["async"] = work is None
    if inside:
        assert work is not None
        work.wait()
    return found


def concurrent(rank: int, world_size: int) -> dict[str, Any]:
    """Several asynchronous calls on two groups, waited for in another order."""
    first, second = dist.new_group(), dist.new_group([0, 1, 2, 3])
    tensors = [mine(rank, 2) + i for i in range(6)]
    works = [dist.all_reduce(t, group=(first, second)[i % 2], async_op=True) for i, t in enumerate(tensors)]
    order = list(range(6)) if rank % 2 else list(reversed(range(6)))
    for i in order:
        work = works[i]
        assert work is not None
        work.wait()
    return {"tensors": tensors}


def sequence(rank: int, world_size: int) -> dict[str, Any]:
    """Many different calls in a row leave each other alone."""
    t = mine(rank, 3)
    dist.all_reduce(t)
    dist.broadcast(t, 1)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    out = [torch.zeros(3) for _ in range(world_size)]
    dist.all_gather(out, t + rank)
    total = torch.stack(out).sum(0)
    dist.reduce(total, 0)
    dist.broadcast(total, 0)
    dist.barrier()
    return {"total": total, "out": out}


def one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """Groups of one."""
    group, _ = dist.new_subgroups_by_enumeration([[i] for i in range(world_size)])
    t = mine(rank, 2)
    dist.all_reduce(t, group=group)
    dist.broadcast(t, rank, group=group)
    out = [torch.zeros(2)]
    dist.all_gather(out, t, group=group)
    swapped = torch.zeros(2)
    dist.all_to_all_single(swapped, t, group=group)
    dist.barrier(group)
    return {"t": t, "out": out, "swapped": swapped}


BODIES = [
    broadcast,
    all_reduce,
    sparse_all_reduce,
    reduce,
    reduce_scatter,
    barrier,
    coalesced,
    coalescing_manager,
    in_a_group,
    concurrent,
    sequence,
    one_rank,
]


@pytest.mark.parametrize("body", BODIES)
def test_collectives(conform: Conform, body: Any) -> None:
    """Every collective, over dtypes, layouts, groups and mistakes, answers what gloo answers."""
    conform(body)
