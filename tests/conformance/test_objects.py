"""Row 7: object collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of, says


@dataclass
class Note:
    """Something picklable of the program's own."""

    rank: int
    text: str


def broadcast(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    objects: list[Any] = [{"a": 1}, "two", [3, (4,)]] if rank == 0 else [None, None, None]
    found["returns"] = dist.broadcast_object_list(objects, src=0)
    found["objects"] = objects
    objects = [Note(rank, "hello") if rank == 2 else None]
    dist.broadcast_object_list(objects, group_src=2)
    found["note"] = [objects[0].rank, objects[0].text]
    objects = [torch.arange(3) if rank == 3 else 0]
    dist.broadcast_object_list(objects, 3, device=torch.device("cpu"))
    found["tensor"] = objects[0]
    found["empty"] = error_of(dist.broadcast_object_list, [], 0) if rank == 0 else None
    found["lambda"] = error_of(dist.broadcast_object_list, [lambda: 1], rank)
    return found


def scatter(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out: list[Any] = [None]
    objects: list[Any] | None = [f"to {i}" * (i + 1) for i in range(world_size)] if rank == 0 else None
    found["returns"] = dist.scatter_object_list(out, objects, src=0)
    found["out"] = out
    out = [None, "stays"]
    objects = [Note(i, "x") for i in range(world_size)] if rank == 2 else [None] * world_size
    dist.scatter_object_list(out, objects, group_src=2)
    found["note"] = [out[0].rank, out[0].text, out[1]]
    found["no output"] = says(dist.scatter_object_list, [], objects, 0)
    found["output is no list"] = error_of(dist.scatter_object_list, None, objects, 0)
    if rank == 0:
        found["no input"] = error_of(dist.scatter_object_list, [None], None, 0)
    return found


def strangers(rank: int, world_size: int) -> dict[str, Any]:
    """A rank that is no member of the group."""
    group = dist.new_group([0, 1])
    if rank < 2:
        return {"member": rank}
    objects: list[Any] = [None, None]
    return {
        "broadcast": says(dist.broadcast_object_list, objects, 0, group),
        "all_gather": says(dist.all_gather_object, objects, rank, group),
        "gather": says(dist.gather_object, rank, None, 0, group),
        "scatter": says(dist.scatter_object_list, objects, None, 0, group),
        "objects": objects,
    }


def identity(rank: int, world_size: int) -> dict[str, Any]:
    """What arrives is a copy: no rank holds another rank's object."""
    thing = [rank]
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, thing)
    objects[0].append(100 + rank)
    dist.barrier()
    return {"mine": thing, "first": objects[0], "is": objects[rank] is thing}


BODIES = [broadcast, scatter, strangers, identity]


@pytest.mark.parametrize("body", BODIES)
def test_object_collectives(conform: Conform, body: Any) -> None:
    """Objects arrive as on gloo, and as copies."""
    conform(body)
