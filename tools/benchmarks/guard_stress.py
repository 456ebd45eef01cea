"""The healthy programs of tests/cases on a machine with twice as many busy loops as cores: false alarms per run.

Peer: none. Aim: no alarm, and every exit code is 0.

    python -m tools.benchmarks.guard_stress [--rounds 20] [--level check,strict] [--load 4] [--only PATTERN]
        [--minutes 60]
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from jobs import Zygote, ring_directory

from distsim.debug.settings import Level
from tests.cases.corpus import HEALTHY
from tools.benchmarks.arguments import Arguments, amount, at_least, count, known, several

LIMIT_S = 240.0


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--level", type=several(known(Level)), default="check,strict")
    parser.add_argument("--load", type=at_least(0), default=2 * (os.cpu_count() or 1))
    parser.add_argument("--only", default="*")
    parser.add_argument("--minutes", type=amount, default=1e6, help="start no further run after these")
    args = parser.parse_args()
    cases = [case for case in HEALTHY if fnmatch.fnmatch(case.path.stem, args.only)]
    if not cases:
        parser.error(f"argument --only: expected a pattern that some healthy program matches, got {args.only!r}")
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    until = time.monotonic() + 60 * args.minutes
    runs = bad = 0
    zygote = Zygote()
    try:
        for number in range(args.rounds):
            for case in cases:
                for level in args.level:
                    if time.monotonic() > until:
                        continue
                    with ring_directory() as folder:
                        result = zygote.run(case.path, case.ranks, directory=folder, level=level, limit_s=LIMIT_S)
                    runs += 1
                    if result.diagnoses or any(result.codes.values()):
                        bad += 1
                        kinds = [diagnosis.kind.value for diagnosis in result.diagnoses]
                        print(f"round {number}, {case.path.stem} at {level}: {kinds}, codes {result.codes}", flush=True)
    finally:
        for process in load:
            process.kill()
            process.wait()
    zygote.close()
    print(f"{runs} runs under {args.load} busy loops, {bad} with an alarm or another exit code")
    sys.exit(int(bad > 0))


if __name__ == "__main__":
    main()
