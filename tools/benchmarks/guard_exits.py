"""Five healthy programs on gloo, run to their end again and again on a busy machine: none may be told as anything.

A run counts as told if `distsim run` prints a line of its own or does not end with 0, or if a rank does not print its
end. On a busy machine torch aborts a rank that ends without destroy_process_group (pytorch/pytorch#190489).

Peer: torchrun without the guard (off). Aim: 0 told.

    python -m tools.benchmarks.guard_exits [--exits 200] [--load 4] [--level check,strict]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from jobs import ENVIRON

from distsim.debug.settings import Level
from tools.benchmarks.arguments import Arguments, at_least, count, known, several

RANKS = 2
LIMIT_S = 600
BUSY = "while True: pass"
BEGIN = """
import signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
"""
END = """
print(f"end of rank {rank}\\n", end="", flush=True)  # in one write: ranks share a pipe
"""
PROGRAMS = {
    "one call": "dist.all_reduce(torch.ones(8))",
    "flag of a signal handler": """
stop = False


def save(signum, frame):
    global stop
    stop = True


signal.signal(signal.SIGUSR1, save)
for step in range(6):
    dist.all_reduce(torch.ones(8))
    if step == 3:
        signal.raise_signal(signal.SIGUSR1)
    flag = torch.tensor(float(stop))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag:
        break
dist.barrier()
dist.destroy_process_group()
""",
    "DDP and asynchronous calls": """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
for work in [dist.all_reduce(torch.ones(16), async_op=True) for _ in range(200)]:
    work.wait()
""",
    "messages": """
for _ in range(20):
    works = [dist.isend(torch.ones(4), 1 - rank), dist.irecv(torch.ones(4), 1 - rank)]
    for work in works:
        work.wait()
""",
    "objects in a group": """
group = dist.new_group([0, 1])
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank}, group=group)
dist.broadcast(torch.ones(8), 0, group=group)
dist.destroy_process_group()
""",
}
OWN_LINE = re.compile(r"^(distsim:|HANG|FAILED|ERROR|WARNING|INTERRUPTED)", re.MULTILINE)


def told(script: Path, level: str) -> str:
    """One run; what was printed if it is told as anything, else nothing."""
    launcher = ["torch.distributed.run"] if level == "off" else ["distsim", "run", "--on", "gloo", "--level", level]
    words = [sys.executable, "-m", *launcher, "--nproc-per-node", str(RANKS), str(script)]
    done = subprocess.run(
        words, cwd=script.parent, env=ENVIRON, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    ends = sorted(line for line in done.stdout.splitlines() if line.startswith("end of"))
    well = done.returncode == 0 and ends == [f"end of rank {rank}" for rank in range(RANKS)]
    return "" if well and not OWN_LINE.search(done.stderr) else f"exit code {done.returncode}\n{done.stderr}"


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--exits", type=count, default=200, help="runs of a level, each of one of the programs in turn")
    parser.add_argument("--load", type=at_least(0), default=2 * (os.cpu_count() or 1), help="busy loops beside it")
    parser.add_argument("--level", type=several(known(Level)), default="off,check")
    args = parser.parse_args()
    load = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.load)]
    bad = 0
    try:
        with tempfile.TemporaryDirectory(prefix="guard-exits-") as folder:
            for level in args.level:
                number_told = 0
                for number in range(args.exits):
                    name, program = list(PROGRAMS.items())[number % len(PROGRAMS)]
                    script = Path(folder) / f"{name.replace(' ', '_')}.py"
                    script.write_text(BEGIN + program + END)
                    if text := told(script, level):
                        number_told += 1
                        print(f"{level}, run {number}, {name}: {text}", flush=True)
                bad += number_told * (level != "off")
                print(f"{level}: {args.exits} runs under {args.load} busy loops, {number_told} told", flush=True)
    finally:
        for process in load:
            process.kill()
            process.wait()
    sys.exit(int(bad > 0))


if __name__ == "__main__":
    main()
