"""torch.distributed.autograd and DistributedOptimizer simulated: gradients are those of one process, to the bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from sim.test_rpc import workers
from torch import Tensor


def weigh(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def inputs() -> tuple[Tensor, Tensor]:
    """Whole numbers: their sums are the same in any order."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-2, 4, (4, 4), generator=generator).float().requires_grad_() for _ in range(2))
    return x, w


def bits(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def half() -> Tensor:
    return torch.full((4, 4), 0.5, requires_grad=True)


def parameter(rref: rpc.RRef[Any]) -> Tensor:
    found: Tensor = rref.local_value()
    return found.detach().clone()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD", "Adadelta", "RMSprop", "Rprop", "Adamax"])
def test_distributed_optimizer(name: str) -> None:
    """Every optimizer that torch maps to a functional one leaves the parameters that it leaves in one process."""

    def program(rank: int) -> Any:
        from torch.distributed.optim import DistributedOptimizer

        if rank:
            return None
        x, _ = inputs()
        there = rpc.remote("worker1", half)
        optimizer = DistributedOptimizer(getattr(torch.optim, name), [there, rpc.RRef(x)], lr=0.1)
        for _ in range(2):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [weigh(x, there.to_here()).sum()])
                optimizer.step(context_id)
        return bits(x.detach(), rpc.rpc_sync("worker1", parameter, args=(there,)))

    x, _ = inputs()
    w = half()
    optimizer = getattr(torch.optim, name)([w, x], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        weigh(x, w).sum().backward()
        optimizer.step()
    assert workers(program).results[0] == bits(x.detach(), w.detach())


def test_a_worker_that_died() -> None:
    """Its gradients will not come: backward says so."""

    def program(rank: int) -> None:
        if rank == 0:
            x, w = inputs()
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", weigh, args=(x, w)).sum()
                rpc.rpc_async("worker1", end)
                with pytest.raises(RuntimeError, match=r"Error on Node 0: (EOF|ECONNREFUSED)"):
                    dist_autograd.backward(context_id, [loss])
            os._exit(0)

    workers(program, check=False)


def end() -> None:
    os._exit(1)
