"""Row 9: reduce operations, and which dtypes they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of, says

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False, rank % 2 == 0, rank == 0])
    return torch.tensor([rank + 1, 3, 5 ^ rank, 1 << rank]).to(dtype)


def all_reduce(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in OPS:
        t = values(rank, dtype)
        said = error_of(dist.all_reduce, t, getattr(dist.ReduceOp, op))
        found[f"{op} error"] = said
        if said == "none":
            found[op] = t
    return found


def others(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """The same operations in reduce, reduce_scatter_tensor and the list form."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.int64, torch.bool):
        for op in OPS:
            reduce_op = getattr(dist.ReduceOp, op)
            key = f"{op} {dtype}"
            if name == "reduce":
                t = values(rank, dtype)
                found[f"{key} error"] = said = error_of(dist.reduce, t, 1, reduce_op)
                if rank == 1 and said == "none":
                    found[key] = t
            elif name == "reduce_scatter_tensor":
                t = values(rank, dtype)
                out = torch.zeros(1, dtype=dtype)
                found[f"{key} error"] = said = error_of(dist.reduce_scatter_tensor, out, t, reduce_op)
                if said == "none":
                    found[key] = out
            else:
                out = torch.zeros(1, dtype=dtype)
                parts = [p.clone() for p in values(rank, dtype).split(1)]
                found[f"{key} error"] = said = error_of(dist.reduce_scatter, out, parts, reduce_op)
                if said == "none":
                    found[key] = out
    return found


def premul(rank: int, world_size: int) -> dict[str, Any]:
    op = dist._make_nccl_premul_sum(2.0)
    return {
        "all_reduce": error_of(dist.all_reduce, torch.ones(2), op),
        "reduce": error_of(dist.reduce, torch.ones(2), 0, op),
        "reduce_scatter": error_of(dist.reduce_scatter_tensor, torch.ones(1), torch.ones(4), op),
        "is PREMUL_SUM": op == dist.ReduceOp.PREMUL_SUM,
    }


def class_itself(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "names": [str(getattr(dist.ReduceOp, op)) for op in OPS],
        "equal": dist.ReduceOp.SUM == dist.ReduceOp.SUM,
        "different": dist.ReduceOp.SUM == dist.ReduceOp.MAX,
        "made": dist.ReduceOp(dist.ReduceOp.MAX) == dist.ReduceOp.MAX,
        "old SUM": dist.reduce_op.SUM == dist.ReduceOp.SUM,
        "old MAX": dist.reduce_op.MAX == dist.ReduceOp.MAX,
    }
    t = torch.tensor([rank])
    dist.all_reduce(t, op=dist.reduce_op.MAX)
    found["by the old name"] = t
    t = torch.tensor([rank])
    dist.all_reduce(t, dist.ReduceOp(dist.ReduceOp.MIN))
    found["made op"] = t
    t = torch.tensor([rank])
    found["a string"] = error_of(dist.all_reduce, t, "sum")
    found["none"] = error_of(dist.all_reduce, t, None)
    return found


def complex_refusals(rank: int, world_size: int) -> dict[str, Any]:
    t = torch.ones(2, dtype=torch.complex64)
    big = torch.ones(8, dtype=torch.complex64)
    found: dict[str, Any] = {}
    for op in ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        reduce_op = getattr(dist.ReduceOp, op)
        found[f"all_reduce {op}"] = says(dist.all_reduce, t, reduce_op)
        found[f"reduce {op}"] = says(dist.reduce, t, 0, reduce_op)
        found[f"reduce_scatter {op}"] = error_of(dist.reduce_scatter_tensor, t, big, reduce_op)
    return found


def rounding(rank: int, world_size: int) -> dict[str, Any]:
    """Integers wrap, averages of integers are cut or refused, halves round."""
    found: dict[str, Any] = {}
    t = torch.tensor([100 + rank], dtype=torch.int8)
    dist.all_reduce(t)
    found["wrapped"] = t
    t = torch.tensor([rank], dtype=torch.int64)
    found["average error"] = said = error_of(dist.all_reduce, t, dist.ReduceOp.AVG)
    if said == "none":
        found["average"] = t
    t = torch.tensor([1.0 + rank / 8], dtype=torch.bfloat16)
    dist.all_reduce(t)
    found["bfloat16"] = t
    t = torch.tensor([60000.0], dtype=torch.float16)
    dist.all_reduce(t)
    found["float16 beyond"] = t
    return found


BODIES: list[Any] = [premul, class_itself, complex_refusals, rounding]
BODIES_WITH_ARGUMENTS: list[Any] = [
    *((all_reduce, dtype) for dtype in DTYPES),
    *((others, name) for name in ("reduce", "reduce_scatter_tensor", "reduce_scatter")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_ops(conform: Conform, dtype: torch.dtype) -> None:
    """Every reduce operation on every dtype gives, or refuses, what gloo gives or refuses."""
    conform(all_reduce, dtype)


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter_tensor", "reduce_scatter"])
def test_other_reductions(conform: Conform, name: str) -> None:
    """The other reductions take the same operations as on gloo."""
    conform(others, name)


@pytest.mark.parametrize("body", BODIES)
def test_reduce_ops(conform: Conform, body: Any) -> None:
    """ReduceOp itself, its old name, and its refusals are torch's."""
    conform(body)
