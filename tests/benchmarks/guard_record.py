"""Our own code a call: a guarded all_reduce over an inner backend that does nothing.

python tests/benchmarks/guard_record.py [--calls 20000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distsim.debug.records.arguments import METHODS
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard import group as guard
from distsim.realexec.guard.recorder import Recorder

LIMIT_US = 10.0


class NoWork:
    """A call that ended before it began."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def measure(calls: int, rounds: int = 9) -> float:
    """Median microseconds of our own code a synchronous call, the empty call taken off."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        ring = RingWriter(Path(folder) / "0.ring", rank=0, world_size=1, local_rank=0, job="bench", attempt=0)
        recorder = Recorder(ring)
        group = guard.GuardedGroup(dist.group.WORLD, recorder.group_log("0", "default_pg", [0]), recorder)
        method = guard._method("allreduce", METHODS["allreduce"])
        work = NoWork()

        def empty(*_: Any) -> NoWork:
            return work

        cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
        cells["raw"].cell_contents = empty
        tensor, options = torch.zeros(1), dist.AllreduceOptions()
        options.asyncOp = False
        tensors = [tensor]
        found = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(calls):
                method(group, tensors, options).wait()
            middle = time.perf_counter()
            for _ in range(calls):
                empty(group, tensors, options).wait()
            end = time.perf_counter()
            found.append((2 * middle - start - end) / calls * 1e6)
    dist.destroy_process_group()
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    args = parser.parse_args()
    own_us = measure(args.calls)
    print(f"record: {own_us:.1f} us of our own code a call (limit {LIMIT_US:g})")
    raise SystemExit(own_us > LIMIT_US)


if __name__ == "__main__":
    main()
