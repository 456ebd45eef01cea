"""Row 16 on CPU tensors: what torch builds on top of process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of, says
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(8, 4)
        self.spare = nn.Linear(4, 4)
        self.use_spare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(torch.relu(self.one(x)))
        return self.spare(x) if self.use_spare else x


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    model = Net()
    model.spare.requires_grad_(False)
    return model


def batch(rank: int, step: int = 0, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 4, generator=generator)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Three steps of SGD; every rank begins with other weights and gets rank 0's."""
    found: dict[str, Any] = {}
    model = DDP(net(seed=rank))
    found["start"] = parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found["losses"] = losses
    found["gradients"] = gradients(model)
    found["end"] = parameters(model)
    return found


def ddp_many_buckets(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    for step in range(2):
        model.zero_grad()
        generator = torch.Generator().manual_seed(step * 10 + rank)
        model(torch.randn(8, 64, generator=generator)).sum().backward()
    return {"sums": [g.sum() for g in gradients(model) if g is not None]}


def ddp_options(rank: int, world_size: int) -> dict[str, Any]:
    """static_graph, broadcast_buffers and a group of its own."""
    found: dict[str, Any] = {}
    model = DDP(net(), static_graph=True)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step)).sum().backward()
    found["static"] = gradients(model)
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DDP(norm, broadcast_buffers=True)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    found["running mean"] = norm[1].running_mean
    rows, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    model = DDP(net(seed=rank), process_group=rows)
    model(batch(rank)).sum().backward()
    found["group"] = gradients(model)
    return found


def ddp_no_sync(rank: int, world_size: int) -> dict[str, Any]:
    model = DDP(net())
    with model.no_sync():
        model(batch(rank, 0)).sum().backward()
        found: dict[str, Any] = {"local": gradients(model)}
    model(batch(rank, 1)).sum().backward()
    found["summed"] = gradients(model)
    return found


def ddp_unused(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters without gradient: an error without find_unused_parameters, zeros with it."""
    found: dict[str, Any] = {}

    def make(**kwargs: Any) -> DDP:
        torch.manual_seed(3)
        inner = Net()
        return DDP(inner, **kwargs)

    model = make()
    model(batch(rank)).sum().backward()
    found["second forward"] = error_of(model, batch(rank))
    try:
        model(batch(rank))
    except RuntimeError as error:
        found["names the reason"] = "Expected to have finished reduction" in str(error)
    model = make(find_unused_parameters=True)
    for step in range(2):
        model.zero_grad(set_to_none=False)
        model(batch(rank, step)).sum().backward()
    found["found"] = gradients(model)
    model = make(find_unused_parameters=True)
    model.module.use_spare = rank == 0
    model(batch(rank)).sum().backward()
    found["used by rank 0 only"] = gradients(model)
    return found


def ddp_join(rank: int, world_size: int) -> dict[str, Any]:
    """Uneven inputs: rank r has r + 1 batches."""
    found: dict[str, Any] = {}
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with model.join():
        for step in range(rank + 1):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            optimizer.step()
            steps += 1
    found["steps"] = steps
    found["end"] = parameters(model)
    model = DDP(net())
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 if rank == 1 else 1):
            model.zero_grad()
            model(batch(rank, step)).sum().backward()
    found["divided by those left"] = parameters(model)

    def all_stop() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(rank + 1):
                model(batch(rank, step)).sum().backward()

    found["throws"] = error_of(all_stop)
    return found


def ddp_hooks(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    found: dict[str, Any] = {}

    # DDP compares annotations with the types themselves, and ours are strings: none here.
    def own(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0] * 2)

    def done(state, bucket):  # type: ignore[no-untyped-def]
        fut: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        fut.set_result(bucket.buffer())
        return fut

    hooks = {
        "own": (None, own),
        "local": (None, done),
        "allreduce": (dist.group.WORLD, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "powerSGD": (power.PowerSGDState(None, 1, start_powerSGD_iter=2), power.powerSGD_hook),
    }
    for name, (state, hook) in hooks.items():
        model = DDP(net())
        model.register_comm_hook(state, hook)
        for step in range(4 if name == "powerSGD" else 1):
            model.zero_grad()
            model(batch(rank, step)).sum().backward()
        found[name] = gradients(model)
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = DDP(net())
        model._register_builtin_comm_hook(kind)
        model(batch(rank, 0)).sum().backward()
        pairs = zip(gradients(model), found["allreduce"], strict=True)
        found[f"C++ {kind.name}"] = [torch.allclose(a, b, atol=1e-2) for a, b in pairs if a is not None]
        found[f"name of {kind.name}"] = model._get_ddp_logging_data()["comm_hook"]
    # Halves are added in an order that is nobody's business: close is all one may ask.
    pairs = zip(found.pop("fp16"), found["allreduce"], strict=True)
    found["fp16 is close"] = [torch.allclose(a, b, atol=1e-2) for a, b in pairs if a is not None]
    found["bf16"] = error_of(DDP(net()).register_comm_hook, None, default_hooks.bf16_compress_hook)
    found["twice"] = error_of(model.register_comm_hook, None, own)
    return found


def ddp_mistakes(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    empty = nn.Linear(2, 2).requires_grad_(False)
    found["nothing to train"] = error_of(DDP, empty)
    found["no module"] = error_of(DDP, 3)
    found["gpu ids"] = error_of(DDP, net(), device_ids=[0])
    return found


def sync_batch_norm(rank: int, world_size: int) -> dict[str, Any]:
    """On CPU tensors SyncBatchNorm is refused or works as torch decides."""
    torch.manual_seed(0)
    model = nn.SyncBatchNorm(4)
    return {"says": says(model, batch(rank))}


def zero_redundancy(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
    return {"end": parameters(model)}


def model_averaging(rank: int, world_size: int) -> dict[str, Any]:
    import torch.distributed.algorithms.model_averaging.averagers as averagers

    model = net(seed=rank)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return {"end": parameters(model)}


def sampler(rank: int, world_size: int) -> dict[str, Any]:
    """DistributedSampler and a DataLoader in the rank itself."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(10.0))
    found: dict[str, Any] = {}
    for name, kwargs in {"shuffled": {"shuffle": True, "seed": 5}, "in order": {"shuffle": False}}.items():
        chosen = DistributedSampler(data, **kwargs)  # type: ignore[arg-type]
        chosen.set_epoch(1)
        found[name] = [x for (x,) in DataLoader(data, batch_size=2, sampler=chosen)]
    return found


BODIES = [
    ddp,
    ddp_many_buckets,
    ddp_options,
    ddp_no_sync,
    ddp_unused,
    ddp_join,
    ddp_hooks,
    ddp_mistakes,
    sync_batch_norm,
    zero_redundancy,
    model_averaging,
    sampler,
]


@pytest.mark.parametrize("body", BODIES)
def test_data_parallel(conform: Conform, body: Any) -> None:
    """DDP in all its modes, and what stands beside it, train as on gloo."""
    conform(body)
