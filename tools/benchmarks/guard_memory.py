"""What a guard takes of a rank's memory: private memory after 5,000 collectives, with and without it.

Peer: the same program without the guard. Aim: at most 16 MiB more.

    python -m tools.benchmarks.guard_memory [--ranks 2]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.benchmarks.arguments import Arguments, count

LIMIT_MIB = 16.0

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group()
tensors = [torch.zeros(n) for n in range(1, 201)]
for step in range(25):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
dist.barrier()
fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line and "kB" in line)
# The ring lies in shared memory that the monitor maps, too: Pss would halve it.
print("MiB", (int(fields["Rss"].split()[0]) - int(fields["Shared_Clean"].split()[0])) / 1024, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def measure(ranks: int, level: str, program: Path) -> float:
    """Largest memory of a rank in MiB at this level; the libraries' code is left out."""
    command = [sys.executable, "-m", "distsim", "run", "--on", "gloo", "--level", level, f"--nproc-per-node={ranks}"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=120, check=True)
    return max(float(line.split("MiB ")[1]) for line in done.stdout.splitlines() if "MiB " in line)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=count, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        plain = measure(args.ranks, "off", program)
        worst = 0.0
        for level in ("record", "check", "strict"):
            more = measure(args.ranks, level, program) - plain
            worst = max(worst, more)
            print(f"{level}: {more:.1f} MiB a rank more than plain's {plain:.0f} (limit {LIMIT_MIB:.0f})", flush=True)
    sys.exit(int(worst > LIMIT_MIB))


if __name__ == "__main__":
    main()
