"""Row 4: DeviceMesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def total(group: Any) -> torch.Tensor:
    t = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(t, group=group)
    return t


def describe(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "shape": list(mesh.shape),
        "ndim": mesh.ndim,
        "size": mesh.size(),
        "mesh": mesh.mesh,
        "names": list(mesh.mesh_dim_names or ()),
        "coordinate": list(mesh.get_coordinate() or ()),
        "rank": mesh.get_rank(),
        "device": mesh.device_type,
    }


def two_dimensions(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {"mesh": describe(mesh)}
    for name in ("dp", "tp"):
        part = mesh[name]
        found[name] = describe(part)
        found[f"{name} total"] = total(part.get_group())
        found[f"{name} ranks"] = dist.get_process_group_ranks(mesh.get_group(name))
        found[f"{name} local"] = mesh.get_local_rank(name)
        found[f"{name} description"] = mesh.get_group(name).group_desc
    found["by number"] = [mesh.get_local_rank(0), mesh.get_local_rank(1), mesh.size(0), mesh.size(1)]
    found["groups"] = [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
    found["turned"] = [describe(mesh["dp", "tp"]), mesh["dp", "tp"] == mesh]
    found["same group"] = mesh["dp"].get_group() is mesh.get_group("dp")
    found["no name"] = error_of(lambda: mesh["pp"])
    found["wrong order"] = error_of(lambda: mesh["tp", "dp"])
    found["which group"] = error_of(mesh.get_group)
    found["which rank"] = error_of(mesh.get_local_rank)
    found["count"] = dist.get_pg_count()
    return found


def three_dimensions(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    found: dict[str, Any] = {"mesh": describe(mesh)}
    part = mesh["pp", "tp"]
    found["part"] = describe(part)
    found["part total"] = [total(group) for group in part.get_all_groups()]
    found["tp of part"] = describe(part["tp"])
    return found


def flatten(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh._flatten("all")
    return {"flat": describe(flat), "total": total(flat.get_group()), "by name": describe(mesh["all"])}


def constructor(rank: int, world_size: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    found: dict[str, Any] = {"mesh": describe(mesh)}
    found["a"] = total(mesh.get_group("a"))
    found["b"] = total(mesh.get_group("b"))
    found["a ranks"] = dist.get_process_group_ranks(mesh.get_group("a"))
    part = DeviceMesh("cpu", [1, 2])
    found["part"] = list(part.get_coordinate() or ())
    found["in part"] = part.get_coordinate() is not None
    if rank in (1, 2):
        found["part total"] = total(part.get_group())
    tensor = DeviceMesh("cpu", torch.arange(world_size))
    found["tensor"] = describe(tensor)
    return found


def from_group(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    found["world"] = describe(mesh)
    found["same"] = mesh.get_group() is group
    rows, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    columns, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    mesh = DeviceMesh.from_group(
        [columns, rows], "cpu", mesh=torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp")
    )
    found["two"] = describe(mesh)
    found["dp"] = total(mesh["dp"].get_group())
    found["without mesh"] = error_of(DeviceMesh.from_group, [columns, rows], "cpu")
    return found


def mistakes(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "too large": error_of(init_device_mesh, "cpu", (3, 3)),
        "names": error_of(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("dp",)),
        "same names": error_of(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("dp", "dp")),
        "device with index": error_of(init_device_mesh, "cpu:0", (4,)),
        "empty": error_of(init_device_mesh, "cpu", ()),
        "constructor too large": error_of(DeviceMesh, "cpu", list(range(world_size + 1))),
    }


BODIES = [
    two_dimensions,
    three_dimensions,
    flatten,
    constructor,
    from_group,
    mistakes,
]


@pytest.mark.parametrize("body", BODIES)
def test_device_mesh(conform: Conform, body: Any) -> None:
    """Meshes, their slices, groups and coordinates are gloo's."""
    conform(body)
