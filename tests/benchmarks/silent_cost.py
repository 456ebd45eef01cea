"""What the search for silent faults costs a simulation: the same training with `--silent off` and with `watch`.

    python -m tests.benchmarks.silent_cost [ROUNDS] [--ranks N]

Peer: the simulation without the search. Aim: at most 1.1 times its CPU seconds.

Trains a small model under DistributedDataParallel in fresh processes, both kinds in turns, prints the least CPU seconds
(user and system) of each and their ratio, and exits with 1 where the ratio is over the aim. CPU seconds and not the
time on the clock: a busy machine changes the latter by more than the search does.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.arguments import Arguments, at_least, count

AIM = 1.1
ROUNDS, RANKS = 3, 4
KINDS = ("off", "watch")
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


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure both kinds in turns."""
    parser = Arguments(__doc__)
    parser.add_argument("rounds", nargs="?", type=count, default=ROUNDS, metavar="ROUNDS", help="runs of each kind")
    parser.add_argument("--ranks", type=at_least(2), default=RANKS, metavar="N", help=f"default {RANKS}")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM, encoding="utf-8")
        run = [sys.executable, "-m", "distsim", "run", "--nproc-per-node", str(arguments.ranks)]
        for _ in range(arguments.rounds):
            for kind in KINDS:
                seconds[kind].append(cpu_seconds([*run, "--silent", kind, str(program)]))
    ratio = min(seconds["watch"]) / min(seconds["off"])
    for kind in KINDS:
        print(f"--silent {kind:<6} {min(seconds[kind]):6.1f} CPU s")
    print(f"ratio           {ratio:6.2f}   (aim: at most {AIM})")
    return int(ratio > AIM)


if __name__ == "__main__":
    sys.exit(main())
