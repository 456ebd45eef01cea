"""Row 6: collectives that move data without adding: gathers, scatters, all-to-all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import ALL_DTYPES, error_of, mine, says


def all_gather(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = [torch.zeros(2, 2) for _ in range(world_size)]
    found["returns"] = dist.all_gather(out, mine(rank, 2, 2))
    found["out"] = out
    for dtype in ALL_DTYPES:
        out = [torch.zeros(2).to(dtype) for _ in range(world_size)]
        found[f"{dtype} error"] = error_of(dist.all_gather, out, mine(rank, 2, dtype=dtype))
        found[f"{dtype}"] = out
    out = [torch.zeros(3) for _ in range(world_size)]
    work = dist.all_gather(out, mine(rank, 3), async_op=True)
    assert work is not None
    work.wait()
    found["async"] = out
    out = [torch.empty(0) for _ in range(world_size)]
    dist.all_gather(out, torch.empty(0))
    found["empty"] = out
    out = [torch.tensor(0.0) for _ in range(world_size)]
    dist.all_gather(out, torch.tensor(float(rank)))
    found["scalar"] = out
    table = torch.zeros(world_size, 3)
    dist.all_gather(list(table.unbind()), mine(rank, 3))
    found["into views"] = table
    out = [torch.zeros(2, 3) for _ in range(world_size)]
    found["columns error"] = error_of(dist.all_gather, out, mine(rank, 3, 2).t())
    found["columns"] = out
    return found


def all_gather_mistakes(rank: int, world_size: int) -> dict[str, Any]:
    t = mine(rank, 2)
    return {
        "too few": error_of(dist.all_gather, [torch.zeros(2)], t),
        "too many": error_of(dist.all_gather, [torch.zeros(2) for _ in range(world_size + 1)], t),
        "dtype": error_of(dist.all_gather, [torch.zeros(2).long() for _ in range(world_size)], t),
        "not a list": error_of(dist.all_gather, torch.zeros(2), t),
        "not a tensor": error_of(dist.all_gather, [torch.zeros(2) for _ in range(world_size)], 3),
        "none": error_of(dist.all_gather, None, t),
        "into too small": error_of(dist.all_gather_into_tensor, torch.zeros(3), t),
        "into other dtype": error_of(dist.all_gather_into_tensor, torch.zeros(8).long(), t),
        "into a list": error_of(dist.all_gather_into_tensor, [torch.zeros(8)], t),
    }


def uneven_all_gather(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank gives as many rows as its number."""
    out = [torch.zeros(i + 1, 2) for i in range(world_size)]
    return {"error": says(dist.all_gather, out, mine(rank, rank + 1, 2)), "out": out}


def all_gather_into(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    flat, stacked = torch.zeros(world_size * 2, 3), torch.zeros(world_size, 2, 3)
    found["returns"] = dist.all_gather_into_tensor(flat, mine(rank, 2, 3))
    found["flat"] = flat
    found["stacked error"] = error_of(dist.all_gather_into_tensor, stacked, mine(rank, 2, 3))
    found["stacked"] = stacked
    for dtype in ALL_DTYPES:
        out = torch.zeros(world_size * 2).to(dtype)
        found[f"{dtype} error"] = error_of(dist.all_gather_into_tensor, out, mine(rank, 2, dtype=dtype))
        found[f"{dtype}"] = out
    out = torch.zeros(world_size)
    work = dist.all_gather_into_tensor(out, torch.tensor([rank + 0.5]), async_op=True)
    assert work is not None
    work.wait()
    found["async"] = out
    out = torch.zeros(world_size)
    found["scalar error"] = error_of(dist.all_gather_into_tensor, out, torch.tensor(float(rank)))
    found["scalar"] = out
    out = torch.empty(0)
    dist.all_gather_into_tensor(out, torch.empty(0))
    found["empty"] = out
    shard = torch.zeros(world_size * 2)
    shard[rank * 2 : rank * 2 + 2] = mine(rank, 2)
    dist.all_gather_into_tensor(shard, shard[rank * 2 : rank * 2 + 2])
    found["in place"] = shard
    out = torch.zeros(world_size * 2)
    found["_all_gather_base"] = error_of(dist._all_gather_base, out, mine(rank, 2))
    found["base"] = out
    return found


def gather(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for root in range(world_size):
        out = [torch.zeros(2) for _ in range(world_size)] if rank == root else None
        found[f"returns {root}"] = dist.gather(mine(rank, 2), out, dst=root)
        found[f"at {root}"] = out
    out = [torch.zeros(2) for _ in range(world_size)] if rank == 3 else None
    work = dist.gather(mine(rank, 2), out, group_dst=3, async_op=True)
    assert work is not None
    work.wait()
    found["async"] = out
    out = [torch.zeros(2) for _ in range(world_size)] if rank == 0 else None
    dist.gather(mine(rank, 2), out)
    found["default root"] = out
    for dtype in ALL_DTYPES:
        out = [torch.zeros(2).to(dtype) for _ in range(world_size)] if rank == 0 else None
        found[f"{dtype} error"] = error_of(dist.gather, mine(rank, 2, dtype=dtype), out)
        found[f"{dtype}"] = out
    t = mine(rank, 2)
    if rank == 0:
        found["root without list"] = says(dist.gather, t, None, 0)
        found["root with too few"] = error_of(dist.gather, t, [torch.zeros(2)], 0)
    else:
        found["list elsewhere"] = says(dist.gather, t, [torch.zeros(2)], 0)
    return found


def scatter(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for root in range(world_size):
        t = torch.zeros(2)
        parts = [torch.full((2,), 10.0 * root + i) for i in range(world_size)] if rank == root else None
        found[f"returns {root}"] = dist.scatter(t, parts, src=root)
        found[f"from {root}"] = t
    t = torch.zeros(2)
    parts = [torch.full((2,), float(i)) for i in range(world_size)] if rank == 2 else None
    work = dist.scatter(t, parts, group_src=2, async_op=True)
    assert work is not None
    work.wait()
    found["async"] = t
    t = torch.zeros(1)
    dist.scatter(t, [torch.tensor([i + 0.5]) for i in range(world_size)] if rank == 0 else None)
    found["default root"] = t
    for dtype in ALL_DTYPES:
        t = torch.zeros(2).to(dtype)
        parts = [mine(i, 2, dtype=dtype) for i in range(world_size)] if rank == 0 else None
        found[f"{dtype} error"] = error_of(dist.scatter, t, parts)
        found[f"{dtype}"] = t
    if rank == 0:
        found["root without list"] = says(dist.scatter, t, None, 0)
        found["root with too few"] = error_of(dist.scatter, t, [t], 0)
        found["wrong size"] = error_of(dist.scatter, t, [torch.zeros(5).to(t.dtype)] * world_size, 0)
    else:
        found["list elsewhere"] = says(dist.scatter, t, [t], 0)
    return found


def all_to_all_single(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = torch.zeros(world_size * 2)
    found["returns"] = dist.all_to_all_single(out, mine(rank, world_size * 2))
    found["even"] = out
    out = torch.zeros(world_size, 3)
    work = dist.all_to_all_single(out, mine(rank, world_size, 3), async_op=True)
    assert work is not None
    work.wait()
    found["rows"] = out
    # Rank r sends i + 1 rows to rank i.
    send = [i + 1 for i in range(world_size)]
    receive = [rank + 1] * world_size
    out = torch.zeros(sum(receive), 2)
    dist.all_to_all_single(out, mine(rank, sum(send), 2), receive, send)
    found["uneven"] = out
    # Nobody sends to rank 0.
    send = [0 if i == 0 else 2 for i in range(world_size)]
    receive = [0 if rank == 0 else 2] * world_size
    out = torch.zeros(sum(receive))
    dist.all_to_all_single(out, mine(rank, sum(send)), output_split_sizes=receive, input_split_sizes=send)
    found["nothing for 0"] = out
    for name, kind in {"array": np.array, "tensors": lambda some: [*torch.tensor(some)]}.items():
        out = torch.zeros(world_size)
        dist.all_to_all_single(out, mine(rank, world_size), kind([1] * world_size), kind([1] * world_size))
        found[f"splits in {name}"] = out
    # Only the input is split evenly.
    out = torch.zeros(world_size)
    dist.all_to_all_single(out, mine(rank, world_size), [1] * world_size)
    found["one split given"] = out
    for dtype in ALL_DTYPES:
        out = torch.zeros(world_size).to(dtype)
        found[f"{dtype} error"] = error_of(dist.all_to_all_single, out, mine(rank, world_size, dtype=dtype))
        found[f"{dtype}"] = out
    empty = torch.empty(0)
    found["empty error"] = error_of(dist.all_to_all_single, empty, torch.empty(0))
    wrong = [1] * (world_size - 1)
    found["too few splits"] = error_of(dist.all_to_all_single, torch.zeros(4), torch.zeros(4), wrong, wrong)
    wrong = [2] * world_size
    found["splits beyond"] = error_of(dist.all_to_all_single, torch.zeros(4), torch.zeros(4), wrong, wrong)
    found["other dtype"] = error_of(dist.all_to_all_single, torch.zeros(4).long(), torch.zeros(4))
    return found


def all_to_all(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = [torch.zeros(2) for _ in range(world_size)]
    parts = [torch.full((2,), 10.0 * rank + i) for i in range(world_size)]
    found["says"] = says(dist.all_to_all, out, parts)
    found["out"] = out
    out = [torch.zeros(i + 1) for i in range(world_size)]
    parts = [torch.full((rank + 1,), 10.0 * rank + i) for i in range(world_size)]
    found["uneven says"] = says(dist.all_to_all, out, parts)
    found["uneven"] = out
    return found


BODIES = [
    all_gather,
    all_gather_mistakes,
    uneven_all_gather,
    all_gather_into,
    gather,
    scatter,
    all_to_all_single,
    all_to_all,
]


@pytest.mark.parametrize("body", BODIES)
def test_exchanges(conform: Conform, body: Any) -> None:
    """Gathers, scatters and all-to-all, over dtypes, layouts and mistakes, answer what gloo answers."""
    conform(body)
