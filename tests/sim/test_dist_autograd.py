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


def through(worker: str, x: Tensor, w: Tensor) -> Tensor:
    """One hop further, and used twice here."""
    there = rpc.rpc_sync(worker, weigh, args=(x, w))
    return there * x + there


def inputs() -> tuple[Tensor, Tensor]:
    """Whole numbers: their sums are the same in any order."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-2, 4, (4, 4), generator=generator).float().requires_grad_() for _ in range(2))
    return x, w


def bits(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def test_gradients_over_several_hops() -> None:
    """A chain over three workers, with a tensor that goes two ways, has one process's gradients, to the bit."""

    def program(rank: int) -> Any:
        if rank:
            return None
        x, w = inputs()
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", through, args=("worker2", x, w))
            loss = (rpc.rpc_sync("worker2", weigh, args=(y, w)) + x).sum()
            dist_autograd.backward(context_id, [loss])
            found = dist_autograd.get_gradients(context_id)
        assert x.grad is None, "they are in the context alone"
        return bits(found[x], found[w])

    x, w = inputs()
    there = weigh(x, w)
    (weigh(there * x + there, w) + x).sum().backward()
    assert workers(program, 3).results[0] == bits(x.grad, w.grad)


def test_errors() -> None:
    """A root that is no scalar, a context that nobody knows, contexts in one another: torch's errors."""

    def program(rank: int) -> bool:
        if rank == 0:
            x, w = inputs()
            with dist_autograd.context() as context_id:
                y = rpc.rpc_sync("worker1", weigh, args=(x, w))
                with pytest.raises(RuntimeError, match="is not a scalar, all roots need to be scalar"):
                    dist_autograd.backward(context_id, [y])
                with pytest.raises(RuntimeError, match="requires_grad not set on root"):
                    dist_autograd.backward(context_id, [torch.zeros(())])
                with pytest.raises(RuntimeError, match="Could not find autograd context with id: 77"):
                    dist_autograd.backward(77, [y.sum()])
                with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
                    dist_autograd.context().__enter__()
            with pytest.raises(RuntimeError, match="Could not find autograd context"):
                dist_autograd.get_gradients(context_id)
        return True

    assert workers(program).results == [True, True]


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
