"""Ranks x collectives in one process: ours beside torch's MultiThreadedTestCase and LocalTensorMode.

    python -m tests.benchmarks.sim_peers [RANKS ...]

Each arm makes the same all_reduces in a process of its own, one after the other. CPU seconds and memory above
what importing torch takes. torch's arms keep no clock and no record, and LocalTensorMode runs one program for all
ranks; it needs some 18 GB for 1,024 of them, so the ranks here are 64 and 256 unless others are given.
MultiThreadedTestCase is what its threads do (its module needs `expecttest`): one thread a rank on torch's
threaded group.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import threading
import time
from typing import Any

CALLS, ELEMENTS = 10, 1_024


def ours(ranks: int) -> list[float]:
    import distsim

    return list(distsim.simulate(_body, on=f"dgx-h100:{ranks // 8}").results)


def _body() -> float:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return _calls(dist.get_rank())


def _calls(rank: int) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.full((ELEMENTS,), float(rank % 7))
    for _ in range(CALLS):
        dist.all_reduce(tensor)
        tensor.fmod_(7)
    return float(tensor[0])


def threads(ranks: int) -> list[float]:
    """What torch's MultiThreadedTestCase does around a test."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, results = dist.HashStore(), [0.0] * ranks

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        results[rank] = _calls(rank)

    all_threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    return results


def local_tensor(ranks: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with LocalTensorMode(ranks):
        tensor: Any = LocalTensor({rank: torch.full((ELEMENTS,), float(rank % 7)) for rank in range(ranks)})
        for _ in range(CALLS):
            dist.all_reduce(tensor)
            tensor.fmod_(7)
        return [float(shard[0]) for shard in tensor._local_tensors.values()]


ARMS = {"distsim": ours, "MultiThreadedTestCase": threads, "LocalTensorMode": local_tensor}


def expected(ranks: int) -> list[float]:
    values = [float(rank % 7) for rank in range(ranks)]
    for _ in range(CALLS):
        values = [sum(values) % 7] * ranks
    return values


def measure(arm: str, ranks: int) -> None:
    """Print CPU and wall seconds, MiB, and whether the results are right."""
    import torch.distributed  # noqa: F401 - before the clock

    if arm == "distsim":
        import distsim  # noqa: F401

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, cpu = time.perf_counter(), time.process_time()
    results = ARMS[arm](ranks)
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024
    print(f"{cpu_s} {wall_s} {mib} {int(results == expected(ranks))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=[64, 256])
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        measure(args.arm, args.ranks[0])
        return
    for ranks in args.ranks:
        print(f"{ranks:,} ranks x {CALLS} all_reduces of {ELEMENTS * 4 // 1024} KiB")
        first = 0.0
        for arm in ARMS:
            command = [sys.executable, "-m", "tests.benchmarks.sim_peers", "--arm", arm, str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                print(f"  {arm:22s} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
                continue
            cpu_s, wall_s, mib, right = map(float, done.stdout.split()[-4:])
            first = first or cpu_s
            exact = "exact" if right else "WRONG"
            print(
                f"  {arm:22s} {cpu_s:7.2f} CPU s {wall_s:7.2f} s {mib:7.0f} MiB, results {exact}; "
                f"ours takes {first / cpu_s:.2f} of its CPU"
            )


if __name__ == "__main__":
    main()
