"""What the guard costs a remote call: python -m tests.benchmarks.guard_rpc [--calls 6000]

`rpc_sync` of 1 KiB between two workers on TensorPipe (aim: at most 5 % more). Guarded and plain calls take turns, two
after one another are a pair, and the median of what the guarded one of a pair takes more is what the guard costs, next
to the median plain call: what else the machine does hits both of a pair or, as often as the other, one. The means of
the lower halves, calls that nothing has pushed off the processor, are compared beside it. A plain call is torch's own,
as it is where no guard is installed (the caller's hooks are taken off before the clock is read), to a function that
the callee does not note. The wall time has both ends; the CPU time is the caller's, its threads and its heartbeat
included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, internal

LIMIT = 1.05
WARM = 50


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def plain_same(x: torch.Tensor) -> torch.Tensor:
    return x


def lower(times: list[float]) -> float:
    return statistics.fmean(sorted(times)[: len(times) // 2])


class Guard:
    """What the guard has put on the caller's way, on and off."""

    def __init__(self) -> None:
        cells = dict(zip(api.rpc_sync.__code__.co_freevars, api.rpc_sync.__closure__ or (), strict=True))
        self._cell = cells["func"]
        self._sync, self._wait, self._udf = self._cell.cell_contents, torch._C.Future.wait, api.PythonUDF

    def put(self, on: bool) -> None:
        future: Any = torch._C.Future
        self._cell.cell_contents = self._sync if on else self._sync.__wrapped__
        future.wait = self._wait if on else self._wait.__wrapped__
        api.PythonUDF = self._udf if on else internal.PythonUDF


def worker(calls: int) -> None:
    """One of the two."""
    rank = int(os.environ["RANK"])
    plain_same.__module__ = api.__name__  # torch's own are not noted
    api.plain_same = plain_same  # type: ignore[attr-defined]
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    x = torch.ones(256)
    if rank == 0:
        guard = Guard()

        def guarded() -> Any:
            return rpc.rpc_sync("worker1", same, args=(x,))

        def plain() -> Any:
            return rpc.rpc_sync("worker1", plain_same, args=(x,))

        kinds: tuple[Callable[[], Any], ...] = (guarded, plain)
        wall: dict[Any, list[float]] = {kind: [] for kind in kinds}
        cpu: dict[Any, list[float]] = {kind: [] for kind in kinds}
        for i in range(2 * (calls + WARM)):
            kind = kinds[(i + i // 2) % 2]
            guard.put(kind is guarded)
            begun, used = time.perf_counter(), time.process_time()
            kind()
            if i >= 2 * WARM:
                wall[kind].append(time.perf_counter() - begun)
                cpu[kind].append(time.process_time() - used)
        guard.put(True)
        for name, times in (("wall", wall), ("caller's CPU", cpu)):
            usual = statistics.median(times[plain])
            more = statistics.median(a - b for a, b in zip(times[guarded], times[plain], strict=True))
            least = lower(times[guarded]) / lower(times[plain])
            said = f"{name}: {usual * 1e6:.1f} us plain, {more * 1e6:+.1f} us guarded: {1 + more / usual:.3f}"
            print(f"rpc_sync of 1 KiB, {said}, of the lower half {least:.3f} (aim: {LIMIT})", flush=True)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=6000)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.calls)
        return
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "2"]
    subprocess.run([*command, __file__, "--worker", "--calls", str(given.calls)], check=True)


if __name__ == "__main__":
    main()
