"""What a recorded call costs by our own code, an operation a row: public functions, and a backend that does nothing.

One rank, so nothing is cold and nobody is waited for. `torch` is what torch's own Python takes for the same call of a
group that does nothing, in the same seconds; its dispatcher, which a guarded call does not pass, is not in it. Each
figure is that of the fastest hundredth of the calls: a busy machine is in all others.

Peer: torch's own Python. Aim: at most 8 us more a call.

    python -m tools.benchmarks.guard_record [--calls 5000]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import distsim.debug
from distsim.realexec.guard import api_wrappers
from tools.benchmarks.arguments import Arguments, count
from tools.benchmarks.guard_operations import operations, untouched

LIMIT_US = 8.0


class NoWork:
    """A call that ended before it began."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class NoGroup:
    """A group of torch's whose methods do nothing."""

    bound_device_id = None

    def __getattr__(self, name: str) -> Callable[..., NoWork]:
        return nothing


WORK = NoWork()


def nothing(*args: Any, **kwargs: Any) -> NoWork:
    """A method of a backend."""
    return WORK


def fastest_us(calls: list[Callable[[], object]], times: int) -> list[float]:
    """Microseconds of each, in turn."""
    took: list[list[int]] = [[] for _ in calls]
    for _ in range(times):
        for call, found in zip(calls, took, strict=True):
            start = time.perf_counter_ns()
            call()
            found.append(time.perf_counter_ns() - start)
    return [sorted(found)[len(found) // 100] / 1e3 for found in took]


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--calls", type=count, default=5000)
    args = parser.parse_args()
    bare = untouched()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", DISTSIM_MONITOR="0")
    api_wrappers._backends = lambda name: nothing
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    worst = 0.0
    with tempfile.TemporaryDirectory(dir=base) as folder:
        distsim.debug.install("record", dir=folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch.set_num_threads(1)
        world, none = dist.group.WORLD, NoGroup()
        print(f"{'us a call':30} {'torch':>6} {'guard':>6} {'more':>6}")
        for name, call in operations(0, 1).items():
            if "future" in name or "coalesced" in name or "send" in name or "broadcast" in name or name == "reduce":
                continue  # these ask the group for more, or take two ranks
            torchs, guards = fastest_us([lambda: call(bare, none), lambda: call(c10d, world)], args.calls)  # noqa: B023
            worst = max(worst, guards - torchs)
            print(f"{name:30} {torchs:6.1f} {guards:6.1f} {guards - torchs:+6.1f}", flush=True)
        dist.destroy_process_group()
        distsim.debug.remove()
    print(f"limit: {LIMIT_US:+g} us")
    raise SystemExit(worst > LIMIT_US)


if __name__ == "__main__":
    main()
