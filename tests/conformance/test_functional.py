"""Row 8: functional collectives, on which DTensor and FSDP2 stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conformance.arms import Conform
from conformance.plain import error_of, mine
from torch.distributed.device_mesh import init_device_mesh


def reductions(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = mine(rank, 2, 2)
    for op in ("sum", "avg", "max", "min", "product"):
        try:
            out = funcol.all_reduce(t, op, dist.group.WORLD)
            found[f"{op} type"] = type(out).__name__
            found[op] = funcol.wait_tensor(out)
        except Exception as error:
            found[op] = type(error).__name__
    found["input"] = t
    out = funcol.all_reduce(t, "sum", list(range(world_size)))
    found["used without wait"] = out + 1
    found["type after use"] = type(out + 1).__name__
    a, b = funcol.all_reduce_coalesced([t, mine(rank, 3)], "sum", dist.group.WORLD)
    found["coalesced"] = [funcol.wait_tensor(a), funcol.wait_tensor(b)]
    same = mine(rank, 2)
    out = funcol.all_reduce_inplace(same, "sum", dist.group.WORLD)
    found["in place"] = [out, same]
    return found


def gathers(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    t = mine(rank, 2, 4)
    group = dist.group.WORLD
    found["dim 0"] = funcol.wait_tensor(funcol.all_gather_tensor(t, 0, group))
    found["dim 1"] = funcol.wait_tensor(funcol.all_gather_tensor(t, 1, group))
    one, two = funcol.all_gather_into_tensor_coalesced([t, mine(rank, 1)], group)
    found["coalesced"] = [funcol.wait_tensor(one), funcol.wait_tensor(two)]
    found["scatter 0"] = funcol.wait_tensor(funcol.reduce_scatter_tensor(mine(rank, 8, 2), "sum", 0, group))
    found["scatter 1"] = funcol.wait_tensor(funcol.reduce_scatter_tensor(mine(rank, 2, 8), "sum", 1, group))
    found["scatter avg"] = funcol.wait_tensor(funcol.reduce_scatter_tensor(mine(rank, 8), "avg", 0, group))
    one, two = funcol.reduce_scatter_tensor_coalesced([mine(rank, 8), mine(rank, 4)], "sum", [0, 0], group)
    found["scatter coalesced"] = [funcol.wait_tensor(one), funcol.wait_tensor(two)]
    found["broadcast"] = funcol.wait_tensor(funcol.broadcast(mine(rank, 3), 2, group))
    found["all_to_all"] = funcol.wait_tensor(funcol.all_to_all_single(mine(rank, 4), None, None, group))
    send, receive = [i + 1 for i in range(world_size)], [rank + 1] * world_size
    out = funcol.all_to_all_single(mine(rank, sum(send)), receive, send, group)
    found["all_to_all uneven"] = funcol.wait_tensor(out)
    pairs = [(i + 1) % world_size for i in range(world_size)]
    found["permute"] = funcol.wait_tensor(funcol.permute_tensor(mine(rank, 2), pairs, group))
    return found


def gradients(rank: int, world_size: int) -> dict[str, Any]:
    """The differentiable forms."""
    found: dict[str, Any] = {}
    group = dist.group.WORLD
    x = mine(rank, 2, 2).requires_grad_()
    out = funcol.all_gather_tensor_autograd(x, 0, group)
    (funcol.wait_tensor(out) * torch.arange(16.0).reshape(8, 2)).sum().backward()
    found["all_gather"] = x.grad
    x = mine(rank, 8).requires_grad_()
    out = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    (out * (rank + 1)).sum().backward()
    found["reduce_scatter"] = x.grad
    x = mine(rank, 4).requires_grad_()
    out = funcol.all_to_all_single_autograd(x, None, None, group)
    (out * (rank + 1)).sum().backward()
    found["all_to_all"] = x.grad
    return found


def with_mesh(rank: int, world_size: int) -> dict[str, Any]:
    """Groups given as a mesh, a mesh and a dimension, a name."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    t = mine(rank, 2)
    found["mesh and dim"] = funcol.wait_tensor(funcol.all_reduce(t, "sum", (mesh, 0)))
    found["slice"] = funcol.wait_tensor(funcol.all_reduce(t, "sum", mesh["tp"]))
    found["group"] = funcol.wait_tensor(funcol.all_reduce(t, "sum", mesh.get_group("tp")))
    name = mesh.get_group("dp").group_name
    found["name"] = funcol.wait_tensor(torch.ops._c10d_functional.all_reduce(t, "sum", name))
    found["unknown name"] = error_of(torch.ops._c10d_functional.all_reduce, t, "sum", "nobody")
    found["size"] = torch._C._distributed_c10d._resolve_process_group(name).size()
    return found


def without_data(rank: int, world_size: int) -> dict[str, Any]:
    """On meta and fake tensors only the shapes are answered, and nobody is asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[str, Any] = {}
    group = dist.group.WORLD
    t = torch.empty(4, 2, device="meta")
    found["meta"] = list(funcol.all_gather_tensor(t, 0, group).shape)
    found["meta device"] = funcol.all_reduce(t, "sum", group).device.type
    if rank != 0:
        with FakeTensorMode():
            t = torch.empty(8, 2)
            found["fake gather"] = list(funcol.wait_tensor(funcol.all_gather_tensor(t, 0, group)).shape)
            out = funcol.reduce_scatter_tensor(t, "sum", 0, group)
            found["fake scatter"] = list(funcol.wait_tensor(out).shape)
    return found


def public_nn(rank: int, world_size: int) -> dict[str, Any]:
    """torch.distributed.nn's differentiable collectives."""
    import torch.distributed.nn.functional as dnn

    found: dict[str, Any] = {}
    x = mine(rank, 2).requires_grad_()
    out = dnn.all_reduce(x)
    (out * (rank + 1)).sum().backward()
    found["all_reduce"] = [out, x.grad]
    x = mine(rank, 2).requires_grad_()
    parts = dnn.all_gather(x)
    (torch.stack(list(parts)) * (rank + 1)).sum().backward()
    found["all_gather"] = [list(parts), x.grad]
    x = mine(rank, 2).requires_grad_()
    out = dnn.broadcast(x, 1)
    out.sum().backward()
    found["broadcast"] = [out, x.grad]
    return found


BODIES = [reductions, gathers, gradients, with_mesh, without_data, public_nn]


@pytest.mark.parametrize("body", BODIES)
def test_functional_collectives(conform: Conform, body: Any) -> None:
    """The functional forms, their gradients, and their shapes without data are gloo's."""
    conform(body)
