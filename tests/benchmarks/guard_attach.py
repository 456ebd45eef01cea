"""What the guard costs by hooks and by patches: CPU time of the calling thread beside plain torch's, in one run.

Peer: plain torch. Aim: by hooks no more than `guard_operations` allows at level check (1.1 times plain or 15 us more).

Each way has a process of its own, of one rank on gloo, and the ways take turns, round by round. Of a round the mean of
the second quarter of the sorted calls counts; printed are medians over the rounds, and the microseconds more than
plain. Needs a torch that has hooks on groups (2.14).

    python -m tests.benchmarks.guard_attach [--calls 1000] [--rounds 5]
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.arguments import Arguments, count
from tests.benchmarks.guard_operations import CHECK_LIMIT, CHECK_LIMIT_US, WARM
from tests.benchmarks.guard_overhead import spawn

WAYS = ("plain", "patches", "hooks")


def worker(rank: int, world: int, port: int, folder: str, way: str, calls: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), DISTSIM_MONITOR="0")
    torch.set_num_threads(1)
    if way != "plain":
        import distsim.debug

        os.environ["DISTSIM_GUARD_ATTACH"] = way
        distsim.debug.install("check", dir=folder)
    dist.init_process_group("gloo")
    assert (type(dist.group.WORLD) is dist.ProcessGroup) == (way != "patches")
    found = {name: round_us(call, calls) for name, call in operations().items()}
    Path(folder, "bench.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def operations() -> dict[str, Callable[[], object]]:
    """The smallest call of each, and a step whose buckets C++ reduces."""
    one, outs = torch.zeros(1), [torch.zeros(1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    data = torch.ones(2, 8)
    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_reduce async": lambda: dist.all_reduce(one, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather(outs, one),
        "barrier": dist.barrier,
        "DDP step": lambda: model(data).sum().backward(),
    }


def round_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds a call, after calls that make the guard know it."""
    for _ in range(WARM):
        call()
    taken = []
    for _ in range(calls):
        began = time.thread_time_ns()
        call()
        taken.append((time.thread_time_ns() - began) / 1e3)
    taken.sort()
    return statistics.fmean(taken[calls // 4 : calls // 2 + 1])


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--calls", type=count, default=1000)
    parser.add_argument("--rounds", type=count, default=5)
    args = parser.parse_args()
    rounds = [{way: spawn(worker, 1, way, args.calls) for way in WAYS} for _ in range(args.rounds)]
    print(f"{'CPU time of the thread':22} {'plain us':>9} {'patches':>16} {'hooks':>16}")
    beyond = []
    for name in rounds[0]["plain"]:
        us = {way: statistics.median(one[way][name] for one in rounds) for way in WAYS}
        columns = [f"{us[way] / us['plain']:.2f} {us[way] - us['plain']:+9.1f} us" for way in WAYS[1:]]
        print(f"{name:22} {us['plain']:9.1f} {columns[0]:>16} {columns[1]:>16}")
        if us["hooks"] > CHECK_LIMIT * us["plain"] and us["hooks"] > us["plain"] + CHECK_LIMIT_US:
            beyond.append(name)
    print(f"by hooks over {CHECK_LIMIT:g} times plain and {CHECK_LIMIT_US:+g} us: {', '.join(beyond) or 'none'}")


if __name__ == "__main__":
    main()
