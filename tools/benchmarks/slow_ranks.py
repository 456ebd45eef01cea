"""Who is named in real gloo jobs with one rank 10 to 30% slower, and who is accused in healthy ones.

Each job has 4 ranks and steps of about 60 ms. Healthy families have noise of every kind that accuses ranks without
reason: checkpoints and an evaluation of rank 0, episodes that go round, imbalance that stays for a while. With rank 2
slower, "at step" is the step of the first line about it, and of the warning.

Peer: none; torchrun and torch say nothing of a rank that is slower. Aim: nobody accused in a healthy job, nobody but
rank 2 named in the others, and rank 2 within 50 steps where the noise of a step is below 6%.

    python -m tools.benchmarks.slow_ranks [--steps 150] [--only NAME,...] [--healthy | --slow]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.benchmarks.arguments import Arguments, count, known, several

PROGRAM = """
import random, sys, time
import torch, torch.distributed as dist

family, factor, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
draw = random.Random(f"{family}:{rank}")
names = family.split("-")
gradient = torch.ones(20_000)

def noise(step):
    one = draw.gauss
    if "data" in names: return draw.lognormvariate(0.0, 0.2)
    if "jitter" in names: return 1 + one(0, 0.1)
    if "moving" in names: return 1 + random.Random(f"{rank}:{step // 20}").gauss(0, 0.08) + one(0, 0.02)
    if "rotating" in names: return (1.3 if step // 25 % size == rank else 1.0) + one(0, 0.02)
    if "swap" in names: return (1.1 if step // 30 % 2 == rank else 1.0) + one(0, 0.02)
    if "refill" in names: return (1.4 if (step + rank) % 7 == 0 else 1.0) + one(0, 0.02)
    if "pauses" in names: return (3.0 if draw.random() < 0.05 else 1.0) + one(0, 0.02)
    if "pareto" in names: return 1 + 0.05 * draw.paretovariate(2.5)
    return 1 + one(0, 0.02)

def compute(step, share):
    slow = factor if rank == 2 and (step >= steps // 2 or "later" not in names) else 1.0
    time.sleep(max(0.0, 0.05 * share * noise(step) * slow))

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.step = step
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        compute(ctx.step, 0.6)
        return grad, None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)
    def forward(self, x, step):
        compute(step, 0.4)
        return self.two(Sleep.apply(self.one(x), step))

model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.1) if "blocking" not in names else None
for step in range(steps):
    if model is not None:
        loss = model(torch.ones(4, 64), step).sum()
        loss.backward()
        model.zero_grad()
        if "loss" in names: dist.all_reduce(loss.detach())
    else:
        for share in (0.5, 0.3, 0.2):
            compute(step, share)
            dist.all_reduce(gradient)
    if "checkpoint" in names and step % 25 == 24 and rank == 0: time.sleep(0.5)
    if "evaluation" in names and step % 40 == 39:
        if rank == 0: time.sleep(1.0)
        dist.barrier()
    if "start" in names and step < 10 and rank == 1: time.sleep(0.1)
dist.destroy_process_group()
"""
FAMILIES = (
    *("ddp", "blocking", "ddp-loss", "ddp-jitter", "ddp-data", "ddp-moving", "blocking-moving", "ddp-rotating"),
    *("ddp-checkpoint", "ddp-evaluation", "blocking-evaluation", "ddp-pauses", "ddp-start", "ddp-swap"),
    *("blocking-refill", "ddp-pareto"),
)
SLOW = (
    *((name, 1.1) for name in ("ddp", "blocking", "ddp-loss", "ddp-checkpoint", "blocking-refill", "ddp-pauses")),
    *((name, 1.2) for name in ("ddp-later", "ddp-jitter", "ddp-evaluation")),
    ("ddp-data", 1.3),
)


def run(family: str, factor: float, steps: int) -> list[tuple[list[int], int, bool]]:
    """Run one job. Return for each line about a slow rank the ranks, the step, and whether it is a warning."""
    with tempfile.TemporaryDirectory() as folder:
        program, events = Path(folder) / "job.py", Path(folder) / "events.jsonl"
        program.write_text(PROGRAM)
        words = ["run", "--on", "gloo", "--nproc-per-node", "4", "--events", str(events), str(program)]
        command = [sys.executable, "-m", "distsim", *words, family, str(factor), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{family}: exit code {done.returncode}: {done.stderr[-500:]}")
        lines = []
        for line in map(json.loads, events.read_text().splitlines()):
            if line["event"] == "pace" and line["kind"] == "looks_slow":
                lines.append(([line["pace"]["rank"]], line["pace"]["at_step"], False))
            elif line["event"] == "straggler":
                lines.append((line["diagnosis"]["culprits"], line["diagnosis"]["pace"]["at_step"], True))
        return lines


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--steps", type=count, default=150)
    parser.add_argument("--only", type=several(known(FAMILIES)), metavar="NAME,...")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--healthy", action="store_true", help="healthy jobs alone")
    which.add_argument("--slow", action="store_true", help="jobs with a slow rank alone")
    given = parser.parse_args()
    jobs = [(name, 1.0) for name in FAMILIES] * (not given.slow) + list(SLOW) * (not given.healthy)
    accused = healthy = right = wrong = slow = 0
    print(f"{'family':<20} {'slower':>6}  looks slow         warned")
    for name, factor in jobs:
        if given.only and name not in given.only:
            continue
        lines = run(name, factor, given.steps)
        shown = [
            ", ".join(f"{ranks[0]} at step {step}" for ranks, step, sure in lines if sure is wanted) or "-"
            for wanted in (False, True)
        ]
        print(f"{name:<20} {factor - 1:>6.0%}  {shown[0]:<18} {shown[1]}", flush=True)
        named = {rank for ranks, _, _ in lines for rank in ranks}
        if factor == 1.0:
            healthy, accused = healthy + 1, accused + bool(named)
        else:
            slow, right, wrong = slow + 1, right + (2 in named), wrong + bool(named - {2})
    print(f"healthy jobs: {accused} of {healthy} accused; slow rank named in {right} of {slow}, another in {wrong}")


if __name__ == "__main__":
    main()
