"""The fault library started by plain torchrun, without distsim, and looked at by `distsim attach`.

    python -m tools.benchmarks.attach_faults [PATTERN]

Peer: none; py-spy by hand shows the same stacks and names nobody. Aim: three quarters of the programs that still run.

Each program of tests/cases gets some seconds to hang. One that has ended by then is left out: there is
nothing to attach to. Prints a line each and the share whose culprits are named; exit code 1 below the aim.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cases.corpus import FAULTS
from tools.benchmarks.arguments import Arguments

HANGS_S = 12.0
"""Until torch is imported, the groups are there, and the fault has struck."""
AIM = 0.75


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def _look(program: Path, ranks: int) -> tuple[str, list[int]] | None:
    """Kind and culprits by attach; None where the job has ended."""
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port",
             str(_free_port()), str(program)],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        try:
            time.sleep(HANGS_S)
            if job.poll() is not None:
                return None
            report = Path(folder) / "report.json"
            done = subprocess.run(
                [sys.executable, "-m", "distsim", "attach", str(job.pid), "--report", str(report)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if "no rank among" in done.stderr:  # the launcher alone is left
                return None
            if not report.exists():
                return done.stderr.strip(), []
            told = json.loads(report.read_text())
            if not told["diagnoses"]:
                return told.get("inconclusive", done.stdout.strip())[:70], []
            return told["diagnoses"][0]["kind"], told["diagnoses"][0]["culprits"]
        finally:
            job.terminate()  # it ends its ranks, which are sessions of their own
            try:
                job.wait(40)
            except subprocess.TimeoutExpired:
                job.kill()


def main() -> int:
    """Print the table and answer the exit code."""
    parser = Arguments(__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="programs whose name it matches (default: all)")
    args = parser.parse_args()
    right = hung = 0
    for case in FAULTS:
        if not re.search(args.pattern, case.name) or not case.runs("check") or case.culprits is None:
            continue
        expected = list(case.culprits)
        seen = _look(case.path, case.ranks)
        if seen is None:
            print(f"{case.name:<36} has ended", flush=True)
            continue
        kind, culprits = seen
        hung += 1
        right += culprits == expected
        word = "named" if culprits == expected else "WRONG"
        print(f"{case.name:<36} {word}  {kind} {culprits}  expected {'|'.join(case.kinds)} {expected}", flush=True)
    print(f"{right} of {hung} named, ratio {right / max(hung, 1):.2f}   aim {AIM}")
    return int(right < AIM * hung)


if __name__ == "__main__":
    sys.exit(main())
