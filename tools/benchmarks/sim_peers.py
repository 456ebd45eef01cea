"""Ranks x collectives in one process: ours beside torch's MultiThreadedTestCase and LocalTensorMode.

    python -m tools.benchmarks.sim_peers [RANKS ...] [--train ddp|fsdp2]

Peer: torch's own simulations. Aim: at most 1.2 of the threads' CPU for 64 ranks.

Each arm makes the same all_reduces in a process of its own, one after the other: once with 8 ranks, which imports what
both need, then three times. The least CPU seconds of the three, and memory above what importing torch takes. torch's
arms keep no clock and no record, and LocalTensorMode runs one program for all ranks; it needs some 18 GB for 1,024 of
them, so the ranks here are 64 and 256 unless others are given. MultiThreadedTestCase is what its threads do (its module
needs `expecttest`): one thread a rank on torch's threaded group. With --train, ranks train a small MLP for some steps
instead, ours beside torch's threads, and beside these under a dispatch mode of torch's that does nothing: the least
that anybody pays who sees every operator from Python.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tools.benchmarks.arguments import Arguments, whole_nodes

CALLS, ELEMENTS = 10, 1_024
REPEATS = 3
STEPS, WIDTH, LAYERS = 5, 64, 4


def ours(ranks: int, work: str) -> list[float]:
    import distsim

    return list(distsim.simulate(_body, on=f"dgx-h100:{ranks // 8}", args=(work,)).results)


def _body(work: str) -> float:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return WORK[work](dist.get_rank())


def _calls(rank: int) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.full((ELEMENTS,), float(rank % 7))
    for _ in range(CALLS):
        dist.all_reduce(tensor)
        tensor.fmod_(7)
    return float(tensor[0])


def _ddp(rank: int) -> float:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_mlp())
    return _train(rank, model)


def _fsdp2(rank: int) -> float:
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _mlp(), init_device_mesh("cpu", (_size(),))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(rank, model)


def _size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def _mlp() -> Any:
    import torch

    drawn = torch.Generator().manual_seed(0)  # of its own: torch's threads share the default one
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) / WIDTH**0.5)
    return model


def _train(rank: int, model: Any) -> float:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.linspace(0.0, 1.0, 8 * WIDTH).reshape(8, WIDTH) + rank % 7
    total = 0.0
    for _ in range(STEPS):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += float(loss)
    return total


WORK = {"calls": _calls, "ddp": _ddp, "fsdp2": _fsdp2}


def threads(ranks: int, work: str, mode: Callable[[], Any] = contextlib.nullcontext) -> list[float]:
    """What torch's MultiThreadedTestCase does around a test, each rank within *mode*."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, results = dist.HashStore(), [0.0] * ranks

    def run(rank: int) -> None:
        torch.autograd.set_multithreading_enabled(False)  # a group is its thread's
        with mode():
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = WORK[work](rank)
            dist.destroy_process_group()

    all_threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    _uninstall_threaded_pg()
    return results


def seen_threads(ranks: int, work: str) -> list[float]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):
        """Passes everything on."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return threads(ranks, work, Nothing)


def local_tensor(ranks: int, work: str) -> list[float]:
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
        results = [float(shard[0]) for shard in tensor._local_tensors.values()]
    dist.destroy_process_group()
    return results


ARMS = {
    "distsim": ours,
    "MultiThreadedTestCase": threads,
    "the same, empty mode": seen_threads,
    "LocalTensorMode": local_tensor,
}


def expected(ranks: int) -> list[float]:
    values = [float(rank % 7) for rank in range(ranks)]
    for _ in range(CALLS):
        values = [sum(values) % 7] * ranks
    return values


def measure(arm: str, ranks: int, work: str) -> None:
    """Print CPU and wall seconds, MiB, and whether the results are right."""
    import torch.distributed  # noqa: F401 - before the clock

    if arm == "distsim":
        import distsim  # noqa: F401

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ARMS[arm](8, work)
    spent = []
    for _ in range(REPEATS):
        begun, cpu = time.perf_counter(), time.process_time()
        results = ARMS[arm](ranks, work)
        spent.append((time.process_time() - cpu, time.perf_counter() - begun))
    cpu_s, wall_s = min(spent)
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024
    right = results == expected(ranks) if work == "calls" else len({round(r, 3) for r in results}) <= 7
    print(f"{cpu_s} {wall_s} {mib} {int(right)}", flush=True)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("ranks", nargs="*", metavar="RANKS", type=whole_nodes, default=[64, 256])
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--train", choices=("ddp", "fsdp2"), default="calls", metavar="ddp|fsdp2", dest="work")
    args = parser.parse_args()
    if args.arm:
        measure(args.arm, args.ranks[0], args.work)
        return
    arms = [arm for arm in ARMS if arm != ("the same, empty mode" if args.work == "calls" else "LocalTensorMode")]
    for ranks in args.ranks:
        if args.work == "calls":
            print(f"{ranks:,} ranks x {CALLS} all_reduces of {ELEMENTS * 4 // 1024} KiB")
        else:
            print(f"{ranks:,} ranks x {STEPS} steps of {args.work}, {LAYERS} linear layers of {WIDTH}")
        first = 0.0
        for arm in arms:
            command = [sys.executable, "-m", "tools.benchmarks.sim_peers", "--arm", arm, str(ranks)]
            command += [] if args.work == "calls" else ["--train", args.work]
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
