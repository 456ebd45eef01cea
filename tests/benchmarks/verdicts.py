"""One program, one verdict: every faulty program of the tests simulated, on gloo at check and at strict.

Printed: kind, culprits, exit code and lines of the first diagnosis, each way, of the programs whose ways differ.

Peer: the program's own simulation. Aim: no row but those that tests/parity/test_one_verdict.py explains.

    python -m tests.benchmarks.verdicts [PATTERN] [--all] [--text] [--ways sim,check,strict]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.benchmarks.arguments import Arguments, known, several

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("realexec", "parity")]

WAYS = ("sim", "check", "strict")


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="regular expression of names, FOLDER/PROGRAM")
    parser.add_argument("--file", action="append", default=[], help="a program of yours: PATH:RANKS[:ARGUMENT...]")
    parser.add_argument("--all", action="store_true", help="print programs whose ways agree, too")
    parser.add_argument("--text", action="store_true", help="print the reports")
    parser.add_argument("--ways", type=several(known(WAYS)), default=list(WAYS), help="of sim,check,strict")
    args = parser.parse_args()

    from jobs import Zygote
    from test_one_verdict import NOT_SIMULATED
    from three_ways import Program, faulty_programs, verdict

    given = [text.split(":") for text in args.file]
    chosen = [Program(Path(path).resolve(), int(ranks), tuple(words)) for path, ranks, *words in given] or [
        program for program in faulty_programs() if re.search(args.pattern, program.name)
    ]
    zygote = Zygote()
    differ = 0
    for program in chosen:
        ways = [way for way in args.ways if way != "sim" or program.name not in NOT_SIMULATED]
        verdicts = {way: verdict(program, way, zygote) for way in ways}
        unlike = len(set(verdicts.values())) > 1
        differ += unlike
        if args.all or unlike:
            for way, seen in verdicts.items():
                print(f"{program.name:36} {way:6} {seen}", flush=True)
                if args.text:
                    print(seen.text, flush=True)
    zygote.close()
    print(f"{differ} of {len(chosen)} programs have more than one verdict")


if __name__ == "__main__":
    main()
