"""Healthy processes end under guard again and again, on a busy machine: none may die of it.

A process with torch loaded forks one after another; each makes a world of one, leaves it with asynchronous calls just
ended, and goes through the whole end of its interpreter. Printed: exit codes, with and without the guard.

Peer: the same without the guard (off). Aim: every exit code is 0.

    python -m tests.benchmarks.guard_exits [--exits 200] [--load 4] [--level check,strict]
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from distsim.debug.settings import Level
from tests.benchmarks.arguments import Arguments, at_least, count, known, several

BUSY = "while True: pass"


def program(number: int) -> None:
    """What each process runs: it ends while the heartbeat has a few hundred calls to look at."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
    until = time.monotonic() + 0.1 + 0.013 * (number % 8)  # the end falls on every part of a beat
    while time.monotonic() < until:
        works = [dist.all_reduce(torch.ones(16), async_op=True) for _ in range(200)]
        for work in works:
            work.wait()
    if number % 2:
        dist.destroy_process_group()


def end(number: int, level: str, folder: Path) -> int:
    """Fork one; its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.environ.update(DISTSIM_LEVEL=level, DISTSIM_DIR=str(folder / str(number)), DISTSIM_MONITOR="0")
    import distsim.debug

    distsim.debug.install()
    program(number)
    sys.exit(0)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--exits", type=count, default=200)
    parser.add_argument("--load", type=at_least(0), default=2 * (os.cpu_count() or 1), help="busy loops beside it")
    parser.add_argument("--level", type=several(known(Level)), default="off,check,strict")
    args = parser.parse_args()
    import torch
    import torch.distributed
    import torch.nn.parallel

    import distsim.realexec.install
    import distsim.realexec.strict.strict  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    load = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.load)]
    bad = 0
    try:
        for level in args.level:
            base = "/dev/shm" if Path("/dev/shm").is_dir() else None
            with tempfile.TemporaryDirectory(prefix="guard-exits-", dir=base) as folder:
                codes = Counter()
                for number in range(args.exits):
                    codes[end(number, level, Path(folder))] += 1
                    for left in Path(folder).glob("*/*"):
                        left.unlink()
            others = {code: number for code, number in codes.items() if code}
            print(f"{level}: {args.exits} exits, {codes[0]} with 0, others {others}", flush=True)
            bad += args.exits - codes[0]
    finally:
        for process in load:
            process.kill()
            process.wait()
    sys.exit(int(bad > 0))


if __name__ == "__main__":
    main()
