"""What the guard costs a remote call.

Peer: torch's own rpc_sync. Aim: at most 5 % more.

    python -m tools.benchmarks.guard_rpc [--calls 2000]

`rpc_sync` of 1 KiB between two workers on TensorPipe. Guarded and plain calls take turns, so
what disturbs the machine hits both alike; of each the mean of the middle half counts. A plain call is torch's own
function below the guard's, to a function that the callee does not note. The wall time has both ends; the CPU time is
the caller's, its threads and its heartbeat included.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api

from tools.benchmarks.arguments import Arguments, count

LIMIT = 1.05
WARM = 50


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def plain_same(x: torch.Tensor) -> torch.Tensor:
    return x


def middle(times: list[float]) -> float:
    times = sorted(times)
    return statistics.fmean(times[len(times) // 4 : -(len(times) // 4) or None])


def worker(calls: int) -> None:
    """One of the two."""
    import os

    from distsim.realexec.install import _hooks
    from distsim.remote_calls.guarded.hooks import RpcHooks

    rank = int(os.environ["RANK"])
    plain_same.__module__ = api.__name__  # torch's own are not noted
    api.plain_same = plain_same  # type: ignore[attr-defined]
    hooks = next(one for one in _hooks if isinstance(one, RpcHooks))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    x = torch.ones(256)
    if rank == 0:

        def guarded() -> Any:
            return rpc.rpc_sync("worker1", same, args=(x,))

        def plain() -> Any:
            hooks._here.quiet = True
            answer = rpc.rpc_sync("worker1", plain_same, args=(x,))
            hooks._here.quiet = False
            return answer

        kinds: tuple[Callable[[], Any], ...] = (guarded, plain)
        wall: dict[Any, list[float]] = {kind: [] for kind in kinds}
        cpu: dict[Any, list[float]] = {kind: [] for kind in kinds}
        for i in range(2 * (calls + WARM)):
            kind = kinds[(i + i // 2) % 2]
            begun, used = time.perf_counter(), time.process_time()
            kind()
            if i >= 2 * WARM:
                wall[kind].append(time.perf_counter() - begun)
                cpu[kind].append(time.process_time() - used)
        for name, times in (("wall", wall), ("caller's CPU", cpu)):
            with_, without = middle(times[guarded]), middle(times[plain])
            said = f"{name}: {with_ * 1e6:.1f} us guarded, {without * 1e6:.1f} us plain"
            print(f"rpc_sync of 1 KiB, {said}: {with_ / without:.3f} (aim: {LIMIT})", flush=True)
    rpc.shutdown()


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--calls", type=count, default=2000)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.calls)
        return
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "2"]
    subprocess.run([*command, "-m", "tools.benchmarks.guard_rpc", "--worker", "--calls", str(given.calls)], check=True)


if __name__ == "__main__":
    main()
