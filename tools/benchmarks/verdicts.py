"""One program, one verdict: every faulty program of tests/cases simulated, on gloo at check and at strict.

Printed: kind, culprits, exit code and lines of the first diagnosis, each way, of the programs whose ways differ.

Peer: the program's own simulation. Aim: no row but those whose case says why.

    python -m tools.benchmarks.verdicts [PATTERN] [--all] [--text] [--ways simulated,check,strict]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from jobs import Zygote

from tests.cases.arms import Verdict, lines, on_gloo, simulate
from tests.cases.corpus import FAULTS
from tools.benchmarks.arguments import Arguments, known, several

WAYS = ("simulated", "check", "strict")


def row(verdict: Verdict) -> str:
    """Kind, culprits, exit code and lines of the first diagnosis."""
    found = [f"{d.kind.value:22} {list(d.culprits)} :{sorted(lines(d))}" for d in verdict.diagnoses]
    return f"{[*found, 'healthy'][0]} {verdict.exit_code}"


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="regular expression of names, FAMILY/PROGRAM")
    parser.add_argument("--all", action="store_true", help="print programs whose ways agree, too")
    parser.add_argument("--text", action="store_true", help="print the reports")
    parser.add_argument("--ways", type=several(known(WAYS)), default=list(WAYS), help="of simulated,check,strict")
    args = parser.parse_args()
    chosen = [case for case in FAULTS if re.search(args.pattern, case.name)]
    zygote = Zygote()
    differ = 0
    for case in chosen:
        verdicts = {
            way: simulate(case) if way == "simulated" else on_gloo(case, way, zygote)
            for way in args.ways
            if case.runs(way)
        }
        unlike = len({row(seen) for seen in verdicts.values()}) > 1
        differ += unlike
        if args.all or unlike:
            for way, seen in verdicts.items():
                print(f"{case.name:36} {way:9} {row(seen)}", flush=True)
                if args.text:
                    print(seen.text, flush=True)
    zygote.close()
    print(f"{differ} of {len(chosen)} programs have more than one verdict")


if __name__ == "__main__":
    main()
