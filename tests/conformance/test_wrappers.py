"""Row 16 on CPU tensors: what torch builds on top of process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of
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


def zero_redundancy(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
    return {"end": parameters(model)}


BODIES = [
    ddp_join,
    ddp_hooks,
    zero_redundancy,
]


@pytest.mark.parametrize("body", BODIES)
def test_data_parallel(conform: Conform, body: Any) -> None:
    """DDP in all its modes, and what stands beside it, train as on gloo."""
    conform(body)
