"""A long healthy job: four groups, asynchronous calls; no stall, no leak, no alarm.

Peer: none. Aim: no alarm, exit codes 0, less than 2 MiB of growth.

    python -m tools.benchmarks.guard_soak [--ranks 4] [--collectives 200000] [--level check]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from jobs import Zygote, ring_directory

from distsim.debug.settings import Level
from tools.benchmarks.arguments import Arguments, at_least, count, known

CALLS = 8
"""Of a round."""
PROGRAM = """
import resource
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(list(range(world))) for _ in range(4)]
tensors = [torch.ones(1 + 64 * i) for i in range(4)]
rounds = int(sys.argv[1]) // 8


def resident_mib():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize() / 2**20


marks = []
start = time.monotonic()
for step in range(rounds):
    works = [dist.all_reduce(t, group=g, async_op=True) for g, t in zip(groups, tensors)]
    for work in works:
        work.wait()
    for g, t in zip(groups, tensors):
        dist.all_reduce(t[:1], group=g)
        t.fill_(1.0)
    if step % max(rounds // 10, 1) == 0:
        marks.append(resident_mib())
if rank == 0:
    print("rss", *[f"{m:.1f}" for m in marks])
    print("seconds", f"{time.monotonic() - start:.1f}")
dist.barrier()
dist.destroy_process_group()
"""


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--collectives", type=at_least(CALLS), default=200_000)
    parser.add_argument("--level", type=known(Level), default="check")
    args = parser.parse_args()
    zygote = Zygote()
    with ring_directory() as folder:
        script = folder / "soak.py"
        script.write_text(PROGRAM)
        result = zygote.run(
            script, args.ranks, directory=folder, level=args.level, args=(str(args.collectives),), limit_s=3600
        )
    zygote.close()
    lines = dict(line.split(" ", 1) for line in result.outputs[0].splitlines() if " " in line)
    rss = [float(word) for word in lines.get("rss", "0").split()]
    growth_mib = rss[-1] - rss[len(rss) // 5]
    print(
        f"{args.collectives} collectives on {args.ranks} ranks at {args.level}: {lines.get('seconds', '?')} s, "
        f"{result.compared} compared, {len(result.diagnoses)} alarms, RSS grew by {growth_mib:.1f} MiB"
    )
    good = not result.diagnoses and set(result.codes.values()) == {0} and growth_mib < 2
    sys.exit(int(not good))


if __name__ == "__main__":
    main()
