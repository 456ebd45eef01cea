"""Measure the classes of host work that need no GPU: what of the constants of distsim/kernels/host.py is Python.

taskset -c 0 python -m tests.benchmarks.host_classes
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ROUNDS, CALLS, CHAIN = 15, 500, 40


class _Clone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].clone()


def best_s(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Seconds of one call, in the fastest of `ROUNDS` rounds."""
    fastest = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        fastest = min(fastest, (time.perf_counter() - began) / calls)
    return fastest


def chained_s(step: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> float:
    """Seconds of *step*, forward and backward, in a chain of `CHAIN`."""

    def run(length: int) -> None:
        y = weight
        for _ in range(length):
            y = step(y)
        y.sum().backward()
        weight.grad = None

    return (best_s(lambda: run(CHAIN), 50) - best_s(lambda: run(0), 50)) / CHAIN


def main() -> None:
    """Print microseconds of each class."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    x, weight = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    clone_s, function_s = chained_s(torch.clone, weight), chained_s(_Clone.apply, weight)
    rows = {
        "operator, forward": best_s(lambda: weight + x),
        "view": best_s(lambda: weight.view(2, 8)),
        "operator and its node, forward and backward": clone_s,
        "autograd.Function with that operator both ways": function_s,
        "of it, beyond the operators": function_s - clone_s,
        "all_reduce, Python alone": best_s(lambda: dist.all_reduce(x)),
        "batch_isend_irecv of two messages, Python alone, a message": best_s(exchange) / 2,
    }
    for name, seconds in rows.items():
        print(f"{name:60s} {seconds * 1e6:6.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
