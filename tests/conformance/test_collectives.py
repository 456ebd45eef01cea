"""Rows 6 and 9: collectives over dtypes, operations, groups, layouts and mistakes; `test_torchs_own` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import ALL_DTYPES, error_of, mine, says
from torch import Tensor

pytestmark = pytest.mark.smoke

REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
REDUCED += [torch.int32, torch.int64, torch.bool, torch.complex64]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]

Make = Callable[[int], Tensor]
"""A tensor of so many elements, which tells its rank."""


def finished(outputs: Any, work: dist.Work | None) -> Any:
    """The outputs of a call once it is over."""
    if work is not None:
        work.wait()
    return outputs


CALLS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda m, r, n, k: finished(t := m(3), dist.broadcast(t, group_src=n - 1, **k)),
    "all_reduce": lambda m, r, n, k: finished(t := m(3), dist.all_reduce(t, **k)),
    "reduce": lambda m, r, n, k: finished([t := m(3)][: r == 1], dist.reduce(t, group_dst=1, **k)),
    "reduce_scatter": lambda m, r, n, k: finished(t := m(2), dist.reduce_scatter(t, [m(2) for _ in range(n)], **k)),
    "reduce_scatter_tensor": lambda m, r, n, k: finished(t := m(2), dist.reduce_scatter_tensor(t, m(2 * n), **k)),
    "_reduce_scatter_base": lambda m, r, n, k: finished(t := m(2), dist._reduce_scatter_base(t, m(2 * n), **k)),
    "all_gather": lambda m, r, n, k: finished(t := [m(2) for _ in range(n)], dist.all_gather(t, m(2), **k)),
    "all_gather_into_tensor": lambda m, r, n, k: finished(t := m(2 * n), dist.all_gather_into_tensor(t, m(2), **k)),
    "_all_gather_base": lambda m, r, n, k: finished(t := m(2 * n), dist._all_gather_base(t, m(2), **k)),
    "gather": lambda m, r, n, k: finished(
        t := [m(2) for _ in range(n)] if r == 1 else None, dist.gather(m(2), t, group_dst=1, **k)
    ),
    "scatter": lambda m, r, n, k: finished(
        t := m(2), dist.scatter(t, [m(2) for _ in range(n)] if r == 1 else None, group_src=1, **k)
    ),
    "all_to_all_single": lambda m, r, n, k: finished(t := m(n), dist.all_to_all_single(t, m(n), **k)),
    "all_to_all": lambda m, r, n, k: finished(
        t := [m(r + 1) for _ in range(n)], dist.all_to_all(t, [m(i + 1) for i in range(n)], **k)
    ),
    "barrier": lambda m, r, n, k: finished(m(1), dist.barrier(**k)),
}
"""What a call leaves in its outputs. `m` makes tensors, `r` is the rank in the group, `n` its size, `k` the rest."""
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter"]


def attempt(call: str, make: Make, rank: int, size: int, **rest: Any) -> Any:
    """What a call leaves in its outputs, or the type of its error."""
    try:
        return CALLS[call](make, rank, size, rest)
    except Exception as error:
        return type(error).__name__


def every_dtype(rank: int, world_size: int, call: str) -> dict[str, Any]:
    """Blocking and not, and without an element."""
    found = {
        f"{dtype} {way}": attempt(call, partial(mine, rank, dtype=dtype), rank, world_size, **rest)
        for dtype in ALL_DTYPES
        for way, rest in {"at once": {}, "async": {"async_op": True}}.items()
        if way == "at once" or dtype is torch.float32
    }
    if call != "all_to_all":
        found["empty"] = attempt(call, lambda _: torch.empty(0), rank, world_size)
    return found


def every_operation(rank: int, world_size: int, call: str) -> dict[str, Any]:
    """Each reduction in each dtype: the result, or the refusal."""

    def values(dtype: torch.dtype, count: int) -> Tensor:
        t = torch.tensor([True, False, rank % 2 == 0, rank == 0] if dtype is torch.bool else [rank + 1, 3, 5 ^ rank, 1])
        return t.repeat(2)[:count].to(dtype)

    return {
        f"{dtype} {op}": attempt(call, partial(values, dtype), rank, world_size, op=getattr(dist.ReduceOp, op))
        for dtype in REDUCED
        for op in OPS
    }


def in_a_group(rank: int, world_size: int) -> dict[str, Any]:
    """The members 3 and 1, in torch's order, and each rank alone; the others get nothing, and say so as torch does."""
    pair, (alone, _) = dist.new_group([3, 1]), dist.new_subgroups_by_enumeration([[i] for i in range(world_size)])
    found: dict[str, Any] = {}
    for call in CALLS:
        number = {1: 0, 3: 1}.get(rank, 0)
        found[call] = attempt(call, partial(mine, rank), number, 2, group=pair)
        if call not in ("reduce", "gather", "scatter"):  # whose root is the second rank
            found[f"{call} alone"] = attempt(call, partial(mine, rank), 0, 1, group=alone)
    work = dist.all_reduce(mine(rank, 2), group=pair, async_op=True)
    found["async"] = work is None
    if work is not None:
        work.wait()
    found["wrong root"] = error_of(dist.broadcast, mine(rank, 2), 0, group=pair)
    return found


def layouts(rank: int, world_size: int) -> dict[str, Any]:
    """Special numbers, tensors that need gradients or are parts of others, rows stacked and uneven."""
    found: dict[str, Any] = {}
    special = torch.tensor([float("inf"), float("nan") if rank == 1 else 1.0, -0.0, 0.1 * (rank + 1)])
    leaf, base, large = mine(rank, 2).requires_grad_(), mine(rank, 4, 4), torch.ones(100_000).long() * (rank + 1)
    for name, t in {"special": special, "leaf": leaf, "row": base[1], "large": large, "scalar": base[0, 0]}.items():
        found[name] = [error_of(dist.all_reduce, t), t[:4] if t.dim() else t]
    found["columns"] = [
        error_of(call, mine(rank, 3, 2).t(), *args) for call, args in ((dist.all_reduce, ()), (dist.broadcast, (0,)))
    ]
    stacked, flat, table = torch.zeros(world_size, 2, 3), torch.zeros(2, 3), torch.zeros(world_size, 3)
    found["gather stacked"] = [error_of(dist.all_gather_into_tensor, stacked, mine(rank, 2, 3)), stacked]
    found["scatter stacked"] = [error_of(dist.reduce_scatter_tensor, flat, mine(rank, 4, 2, 3)), flat]
    dist.all_gather(list(table.unbind()), mine(rank, 3))
    found["into views"] = table
    columns = [torch.zeros(2, 3) for _ in range(world_size)]
    found["gather columns"] = [error_of(dist.all_gather, columns, mine(rank, 3, 2).t()), columns]
    out = torch.zeros(world_size)
    found["scalars"] = [error_of(dist.all_gather_into_tensor, out, torch.tensor(float(rank))), out]
    return found


def sparse(rank: int, world_size: int) -> dict[str, Any]:
    t = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.tensor([1.0, 2.0 + rank]), (5,))
    dist.all_reduce(t)
    return {"dense": t.to_dense(), "eye": error_of(dist.all_reduce, torch.eye(2).to_sparse())}


def uneven_all_gather(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank gives as many rows as its number."""
    out = [torch.zeros(i + 1, 2) for i in range(world_size)]
    return {"error": says(dist.all_gather, out, mine(rank, rank + 1, 2)), "out": out}


def splits(rank: int, world_size: int) -> dict[str, Any]:
    """Rank r sends i + 1 rows to rank i; nobody sends to rank 0; splits that are no list, or of one side only."""
    found: dict[str, Any] = {}
    for name, send, receive in (
        ("uneven", [i + 1 for i in range(world_size)], [rank + 1] * world_size),
        ("nothing for 0", [2 * (i > 0) for i in range(world_size)], [2 * (rank > 0)] * world_size),
    ):
        out = torch.zeros(sum(receive), 2)
        dist.all_to_all_single(out, mine(rank, sum(send), 2), receive, send)
        found[name] = out
    ones = [1] * world_size
    for name, given in {"array": [np.array(ones)] * 2, "tensors": [[*torch.tensor(ones)]] * 2, "one": [ones]}.items():
        out = torch.zeros(world_size)
        dist.all_to_all_single(out, mine(rank, world_size), *given)
        found[f"splits in {name}"] = out
    return found


def mistakes(rank: int, world_size: int) -> dict[str, Any]:
    """Arguments that torch or gloo refuses, on every rank or at the root."""
    t, out, several = mine(rank, 2), torch.zeros(2), [torch.zeros(2) for _ in range(world_size)]
    long, wrong = several[0].long(), [1] * (world_size - 1)
    calls: dict[str, tuple[Any, ...]] = {
        "no source": (dist.broadcast, t), "no target": (dist.reduce, t), "list": (dist.all_reduce, [t]),
        "none": (dist.all_reduce, None),
        "string": (dist.all_reduce, t, "sum"), "no operation": (dist.all_reduce, t, None),
        "too small": (dist.reduce_scatter_tensor, out, mine(rank, 7)),
        "other dtype": (dist.reduce_scatter_tensor, out, mine(rank, 8).long()),
        "too few parts": (dist.reduce_scatter, out, [out]), "too few": (dist.all_gather, [out], t),
        "too many": (dist.all_gather, [*several, out], t), "dtype": (dist.all_gather, [long] * world_size, t),
        "not a list": (dist.all_gather, out, t), "not a tensor": (dist.all_gather, several, 3),
        "no outputs": (dist.all_gather, None, t), "into too small": (dist.all_gather_into_tensor, torch.zeros(3), t),
        "into other dtype": (dist.all_gather_into_tensor, torch.zeros(8).long(), t),
        "into a list": (dist.all_gather_into_tensor, [torch.zeros(8)], t),
        "too few splits": (dist.all_to_all_single, torch.zeros(4), torch.zeros(4), wrong, wrong),
        "splits beyond": (dist.all_to_all_single, torch.zeros(4), torch.zeros(4), [2] * 4, [2] * 4),
        "to other dtype": (dist.all_to_all_single, torch.zeros(4).long(), torch.zeros(4)),
        "mixed dtypes": (dist.all_reduce_coalesced, [t, long]),
    }  # fmt: skip
    found = {name: error_of(*call) for name, call in calls.items()}
    found["two sources"] = says(dist.broadcast, t, 0, group_src=0)
    found["device_ids"] = [error_of(dist.barrier, device_ids=ids) for ids in ([0], 0)]
    if rank == 0:
        found["root"] = [says(dist.gather, t, None, 0), error_of(dist.gather, t, [out], 0)]
        found["root"] += [says(dist.scatter, t, None, 0), error_of(dist.scatter, t, [t], 0)]
        found["root"] += [error_of(dist.scatter, t, [torch.zeros(5)] * world_size, 0)]
    else:
        found["list elsewhere"] = [says(dist.gather, t, [out], 0), says(dist.scatter, t, [t], 0)]
    return found


def coalesced(rank: int, world_size: int) -> dict[str, Any]:
    """Lists of tensors, and the context manager that torch's own libraries use."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    found: dict[str, Any] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        ts = [mine(rank, 2), mine(rank, 3) + 100]
        found[f"{op}"] = [error_of(dist.all_reduce_coalesced, ts, op), ts]
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(world_size)]
    found["all_gather"] = [error_of(dist.all_gather_coalesced, lists, [mine(rank, 2), mine(rank, 1) + 0.5]), lists]
    for call in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        for is_async in (False, True):
            with _coalescing_manager(async_ops=is_async) as manager:
                outputs = [CALLS[call](partial(mine, rank), rank, world_size, {}) for _ in range(2)]
            if is_async:
                manager.wait()
            found[f"managed {call} {is_async}"] = outputs
    return found


def premul(rank: int, world_size: int) -> dict[str, Any]:
    op = dist._make_nccl_premul_sum(2.0)
    found = {call: attempt(call, partial(mine, rank), rank, world_size, op=op) for call in REDUCTIONS}
    return found | {"is PREMUL_SUM": op == dist.ReduceOp.PREMUL_SUM}


def class_itself(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "names": [str(getattr(dist.ReduceOp, op)) for op in OPS],
        "equal": [dist.ReduceOp.SUM == dist.ReduceOp.SUM, dist.ReduceOp.SUM == dist.ReduceOp.MAX],
        "made": dist.ReduceOp(dist.ReduceOp.MAX) == dist.ReduceOp.MAX,
        "old": [dist.reduce_op.SUM == dist.ReduceOp.SUM, dist.reduce_op.MAX == dist.ReduceOp.MAX],
    }
    for name, op in {"by the old name": dist.reduce_op.MAX, "made op": dist.ReduceOp(dist.ReduceOp.MIN)}.items():
        found[name] = attempt("all_reduce", partial(mine, rank), rank, world_size, op=op)
    return found


def complex_refusals(rank: int, world_size: int) -> dict[str, Any]:
    t = torch.ones(2, dtype=torch.complex64)
    return {
        f"{call.__name__} {op}": says(call, t, *root, getattr(dist.ReduceOp, op))
        for op in ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
        for call, root in ((dist.all_reduce, ()), (dist.reduce, (0,)))
    }


def rounding(rank: int, world_size: int) -> dict[str, Any]:
    """Integers wrap, halves round and overflow."""
    found: dict[str, Any] = {}
    for value, dtype in ((100 + rank, torch.int8), (1.0 + rank / 8, torch.bfloat16), (60000.0, torch.float16)):
        t = torch.tensor([value], dtype=dtype)
        dist.all_reduce(t)
        found[str(dtype)] = t
    return found


BODIES: list[Any] = [
    in_a_group,
    layouts,
    sparse,
    uneven_all_gather,
    splits,
    mistakes,
    coalesced,
    premul,
    class_itself,
    complex_refusals,
    rounding,
]


@pytest.mark.parametrize("body", BODIES)
def test_collectives(conform: Conform, body: Any) -> None:
    """Groups, layouts, splits, mistakes and operations answer what gloo answers."""
    conform(body)


@pytest.mark.parametrize("call", CALLS)
def test_every_dtype(conform: Conform, call: str) -> None:
    """Each collective gives, or refuses, what gloo gives or refuses."""
    conform(every_dtype, call)


@pytest.mark.parametrize("call", REDUCTIONS)
def test_every_operation(conform: Conform, call: str) -> None:
    """Each reduction takes the operations that gloo takes."""
    conform(every_operation, call)
