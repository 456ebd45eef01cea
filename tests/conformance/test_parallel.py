"""Row 16 on CPU tensors: sharded, tensor and pipeline parallel, and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform, Place, own_init
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class MLP(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def stack(count: int = 3) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(MLP() for _ in range(count)))


def batch(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def fsdp(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = stack()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = model(batch(10 * step + rank)).pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        found[f"norm {step}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    found["losses"] = losses
    first = next(model.parameters())
    assert isinstance(first, DTensor)
    found["local"] = first.to_local()
    found["full"] = first.full_tensor()
    return found


def fsdp_options(rank: int, world_size: int) -> dict[str, Any]:
    """Two dimensions (HSDP), mixed precision, no resharding, accumulation."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = stack(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    model(batch(rank)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch(rank + 10)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    found["accumulated"] = [g.full_tensor() for g in grads if isinstance(g, DTensor)]
    half = stack(1)
    fully_shard(half, mesh=mesh["shard"], mp_policy=policy)
    out = half(batch(rank))
    found["dtype"] = str(out.dtype)
    out.float().sum().backward()
    found["reduced in"] = str(next(half.parameters()).grad.dtype)
    return found


def tensor_parallel(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    model = parallelize_module(stack(1)[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = batch(5)
    out = model(x)
    found["out"] = out
    out.sum().backward()
    weight = model.up.weight
    assert isinstance(weight, DTensor)
    found["local shape"] = list(weight.to_local().shape)
    grad = weight.grad
    assert isinstance(grad, DTensor)
    found["gradient"] = grad.full_tensor()
    return found


def dtensor(rank: int, world_size: int) -> dict[str, Any]:
    """Redistribution between all placements, and a few operators."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(32.0).reshape(8, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    found["rows"] = rows.to_local()
    found["columns"] = rows.redistribute(mesh, [Shard(1)]).to_local()
    found["replicated"] = rows.redistribute(mesh, [Replicate()]).to_local()
    partial = DTensor.from_local(torch.full((4, 4), float(rank)), mesh, [Partial()])
    found["reduced"] = partial.redistribute(mesh, [Replicate()]).to_local()
    found["reduce scattered"] = partial.redistribute(mesh, [Shard(0)]).to_local()
    found["sum"] = rows.sum().full_tensor()
    found["product"] = (rows @ distribute_tensor(torch.eye(4), mesh, [Replicate()])).full_tensor()
    uneven = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    found["uneven"] = uneven.to_local()
    found["uneven full"] = uneven.full_tensor()
    found["from rank 0"] = distribute_tensor(torch.full((2,), float(rank)), mesh, [Replicate()]).to_local()
    return found


def pipeline(rank: int, world_size: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    device = torch.device("cpu")
    whole = stack(2 * world_size if name == "interleaved" else world_size)
    target = batch(99, rows=8)

    def loss_function(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (out - wanted).pow(2).mean()

    schedule: Any
    if name == "interleaved":
        parts = [whole[rank], whole[rank + world_size]]
        stages = [PipelineStage(part, rank + i * world_size, 2 * world_size, device) for i, part in enumerate(parts)]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_function)
    else:
        parts = [whole[rank]]
        one = PipelineStage(whole[rank], rank, world_size, device)
        kind = ScheduleGPipe if name == "gpipe" else Schedule1F1B
        schedule = kind(one, n_microbatches=4, loss_fn=loss_function)
    losses: list[torch.Tensor] = []
    x = batch(98, rows=8)
    if rank == 0 and rank == world_size - 1:
        schedule.step(x, target=target, losses=losses)
    elif rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        out = schedule.step(target=target, losses=losses)
        found["out"] = out
    else:
        schedule.step()
    found["losses"] = losses
    found["gradients"] = [p.grad for part in parts for p in part.parameters()]
    return found


@own_init
def checkpoint(rank: int, world_size: int, place: Place) -> dict[str, Any]:
    """Saved by four ranks, loaded into another layout."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    dist.init_process_group("gloo")
    model = stack(1)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    state = {"model": get_model_state_dict(model), "step": 7, "own": {f"rank{rank}": torch.tensor([rank])}}
    dcp.save(state, checkpoint_id=f"{place.directory}/checkpoint")
    dist.barrier()
    torch.manual_seed(77)
    other = nn.Sequential(MLP())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(other, mesh=mesh["shard"])
    loaded: dict[str, Any] = {"model": get_model_state_dict(other), "step": 0}
    loaded["own"] = {f"rank{rank}": torch.tensor([0])}
    dcp.load(loaded, checkpoint_id=f"{place.directory}/checkpoint")
    set_model_state_dict(other, loaded["model"])
    weight = other[0].up.weight
    assert isinstance(weight, DTensor)
    found = {"step": loaded["step"], "own": loaded["own"][f"rank{rank}"], "weight": weight.full_tensor()}
    try:
        dcp.load({"x": torch.zeros(1)}, checkpoint_id=f"{place.directory}/checkpoint")
    except BaseException as error:  # CheckpointException is no Exception
        found["missing"] = type(error).__name__
    dist.destroy_process_group()
    return found


BODIES: list[Any] = [
    fsdp,
    fsdp_options,
    tensor_parallel,
    dtensor,
    checkpoint,
]


@pytest.mark.parametrize("body", BODIES)
def test_sharded(conform: Conform, body: Any) -> None:
    """FSDP2, DTensor, tensor parallel and checkpoints compute what they compute on gloo."""
    conform(body)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_pipeline(conform: Conform, name: str) -> None:
    """Pipeline schedules give gloo's losses and gradients."""
    conform(pipeline, name)
