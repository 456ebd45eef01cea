"""What the search for silent faults costs: the same training, simulated and on gloo, without it and with it.

    python -m tools.benchmarks.silent_cost [ROUNDS] [--ranks N]

Peer: the run with `--silent off`. Aim: at most 1.1 times the CPU seconds of a simulation, and at most 1.02 times those
of a step of a model of 100 million parameters on gloo.

Trains under DistributedDataParallel in fresh processes, both kinds in turns, prints the least CPU seconds (user and
system) of each and their ratio, and exits with 1 where a ratio is over its aim. CPU seconds and not the time on the
clock: a busy machine changes the latter by more than the search does. On gloo each step is measured on both ranks: the
first three, in which all tensors are looked at, as every hundredth later, and sixteen more, in which each is once.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.benchmarks.arguments import Arguments, at_least, count

AIM, GLOO_AIM = 1.1, 1.02
ROUNDS, RANKS = 3, 4
KINDS = ("off", "watch")
FULL, TURNS, EVERY = 3, 16, 100
"""Steps with all tensors at the begin, steps in which each has its turn, and one in so many with all."""
PROGRAM = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for _ in range(30):
    x = torch.randn(64, 256)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
dist.destroy_process_group()
"""
GLOO_PROGRAM = f"""\
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(24)]))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
torch.manual_seed(dist.get_rank())
seconds = []
for _ in range({FULL + TURNS}):
    begin = time.process_time()
    x = torch.randn(128, 2048)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    seconds.append(time.process_time() - begin)
print("seconds", *seconds, flush=True)
dist.destroy_process_group()
"""


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def step_seconds(command: list[str]) -> float:
    """CPU seconds of a step on gloo, as a long run has them: the mean over the ranks."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ).stdout
    lines = [line.partition("seconds ")[2] for line in output.splitlines() if "seconds " in line]
    ranks = [[float(word) for word in line.split()] for line in lines]
    # The first step makes the optimizer's state and DDP's buckets anew, with or without the search.
    full = statistics.mean(second for of_rank in ranks for second in of_rank[1:FULL])
    rest = statistics.mean(second for of_rank in ranks for second in of_rank[FULL:])
    return (full + (EVERY - 1) * rest) / EVERY


def main() -> int:
    """Measure both kinds in turns."""
    parser = Arguments(__doc__)
    parser.add_argument("rounds", nargs="?", type=count, default=ROUNDS, metavar="ROUNDS", help="runs of each kind")
    parser.add_argument("--ranks", type=at_least(2), default=RANKS, metavar="N", help=f"default {RANKS}")
    arguments = parser.parse_args()
    simulated: dict[str, list[float]] = {kind: [] for kind in KINDS}
    real: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        program, gloo_program = Path(folder) / "train.py", Path(folder) / "train_large.py"
        program.write_text(PROGRAM, encoding="utf-8")
        gloo_program.write_text(GLOO_PROGRAM, encoding="utf-8")
        run = [sys.executable, "-m", "distsim", "run"]
        for _ in range(arguments.rounds):
            for kind in KINDS:
                ranks = ["--nproc-per-node", str(arguments.ranks)]
                simulated[kind].append(cpu_seconds([*run, *ranks, "--silent", kind, str(program)]))
                real[kind].append(
                    step_seconds([*run, "--on", "gloo", "--nproc-per-node", "2", "--silent", kind, str(gloo_program)])
                )
    over = False
    for name, seconds, aim in (("simulated", simulated, AIM), ("a step on gloo", real, GLOO_AIM)):
        ratio = min(seconds["watch"]) / min(seconds["off"])
        for kind in KINDS:
            print(f"{name:<15} --silent {kind:<6} {min(seconds[kind]):7.2f} CPU s")
        print(f"{name:<15} ratio          {ratio:8.3f}   (aim: at most {aim})")
        over = over or ratio > aim
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
