"""What a simulated remote call takes.

Peer: a Python loop in the same run. Aim: 2 s between two workers, 5 s between 64.

    python -m tools.benchmarks.sim_rpc

1,000 rpc_sync of a small tensor between two workers, and 64 workers that each call every other once. Wall time and CPU
seconds; and what ten million steps of a Python loop take now, to judge the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc

import distsim
from tools.benchmarks.arguments import Arguments

CALLS, WORKERS = 1_000, 64


def pair() -> None:
    """One worker calls another."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    for _ in range(CALLS if rank == 0 else 0):
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(4), 1))
    rpc.shutdown()


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def everybody() -> None:
    """Each worker calls every other."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS)
    for other in range(WORKERS):
        if other != rank:
            rpc.rpc_sync(f"worker{other}", same, args=(torch.ones(4),))
    rpc.shutdown()


def timed(what: str, body: Callable[[], Any], num: int) -> None:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    distsim.simulate(body, on=f"ethernet-cpu:{num}", nproc_per_node=1)
    print(f"{what}: {time.perf_counter() - wall_s:.2f} s, {time.process_time() - cpu_s:.2f} s of CPU")


def main() -> None:
    Arguments(__doc__).parse_args()
    distsim.simulate(same, on="ethernet-cpu:1", nproc_per_node=1, args=(torch.ones(1),))  # imports
    timed(f"{CALLS} rpc_sync between two workers", pair, 2)
    timed(f"{WORKERS} workers, each calling every other", everybody, WORKERS)
    begun = time.process_time()
    total = 0
    for i in range(10_000_000):
        total += i
    print(f"a Python loop of 10,000,000 steps: {time.process_time() - begun:.2f} s of CPU")


if __name__ == "__main__":
    main()
