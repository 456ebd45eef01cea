"""Modes of torch and of the program's own see the calls of a group, as torch's dispatcher shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode


def _calls(rank: int, world_size: int) -> None:
    """A call of each kind of operator that gloo has."""
    one, all_ = torch.ones(4), torch.ones(4 * world_size)
    several = [torch.ones(4) for _ in range(world_size)]
    dist.all_reduce(one)
    dist.all_reduce(one, async_op=True).wait()
    dist.broadcast(one, 0)
    dist.reduce(one, 0)
    dist.all_gather(several, one)
    dist.all_gather_into_tensor(all_, one)
    dist.reduce_scatter_tensor(one, all_)
    dist.gather(one, several if rank == 0 else None)
    dist.scatter(one, several if rank == 0 else None)
    dist.all_to_all_single(all_, all_.clone())
    dist.barrier()
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(one, 1 - rank)


def comm_debug_mode(rank: int, world_size: int) -> dict[str, Any]:
    """The counts of hand-made calls and of FSDP2."""
    with CommDebugMode() as calls:
        _calls(rank, world_size)
    sharded = fully_shard(torch.nn.Linear(8, 8))
    with CommDebugMode() as training:
        sharded(torch.ones(2, 8)).sum().backward()
    return {
        name: sorted((str(operator), count) for operator, count in mode.get_comm_counts().items())
        for name, mode in (("calls", calls), ("FSDP2", training))
    }


class _Names(TorchDispatchMode):
    """Notes every operator of c10d, and what it returns."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.notes.append(f"{func} {type(result) is tuple}")
        return result


def modes_within_modes(rank: int, world_size: int) -> dict[str, Any]:
    """The inner one is first; the calls arrive and give what they give without."""
    inner: list[str] = []
    outer: list[str] = []
    with _Names(outer), _Names(inner):
        _calls(rank, world_size)
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor)
    return {"inner": inner, "same": inner == outer, "sum": tensor.tolist()}


@pytest.mark.parametrize("body", [comm_debug_mode, modes_within_modes])
def test_dispatch_modes(body: Any, conform: Conform) -> None:
    """Both arms show them the same operators."""
    conform(body)
