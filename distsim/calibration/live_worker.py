"""One rank of a live measurement of gloo: `python -m distsim.calibration.live_worker SIZES OPS SECONDS`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """Measure and print."""
    import torch
    import torch.distributed as dist

    sizes = [int(text) for text in argv[0].split(",")]
    ops = argv[1].split(",")
    budget_s = float(argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for op in ops:
        for nbytes in sizes:
            calls[(op, nbytes)] = _call(op, nbytes, size, torch, dist)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    _round(calls, times, dist)
    for found in times.values():
        found.clear()
    began = time.perf_counter()
    rounds = 0
    while True:
        # Rank 0 decides when to stop, and all stop together.
        more = torch.tensor([time.perf_counter() - began < budget_s or rounds < 5])
        dist.broadcast(more, 0)
        if not bool(more):
            break
        _round(calls, times, dist)
        rounds += 1
    if dist.get_rank() == 0:
        rows = [
            {"op": op, "size_bytes": nbytes, "time_us": sorted(found)[len(found) // 4] * 1e6}
            for (op, nbytes), found in times.items()
        ]
        print(
            json.dumps({"ranks": size, "torch": torch.__version__, "rounds": rounds, "rows": rows}),
            flush=True,
        )
    dist.destroy_process_group()


def _round(
    calls: dict[tuple[str, int], Callable[[], Any]], times: dict[tuple[str, int], list[float]], dist: Any
) -> None:
    for key, call in calls.items():
        dist.barrier()
        began = time.perf_counter()
        call()
        times[key].append(time.perf_counter() - began)


def _call(op: str, nbytes: int, size: int, torch: Any, dist: Any) -> Callable[[], Any]:
    count = max(size, nbytes // 4 // size * size)
    whole, other = torch.ones(count), torch.ones(count)
    part = torch.ones(count // size)
    rank = dist.get_rank()
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(other, part)
    if op == "alltoall":
        return lambda: dist.all_to_all_single(other, whole)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    if op == "reduce":
        return lambda: dist.reduce(whole, 0)
    if op != "sendrecv":
        raise SystemExit(f"expected an operation gloo is measured with, got {op}")

    def exchange() -> None:
        work = dist.isend(whole, (rank + 1) % size)
        dist.recv(other, (rank - 1) % size)
        work.wait()

    return exchange


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("distsim calibrate --on gloo starts this, one process a rank")
    main(sys.argv[1:])
