"""From fault to verdict, over our own fault tests that no patience is asked for.

The fault is there when the last rank that it needs is stuck (its last call was made) or dead.

Peer: none; plain gloo says nothing before its timeout, 30 minutes. Aim: median 1 s, 95th percentile 2 s.

    python -m tools.benchmarks.guard_latency [--only NAME,...]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from jobs import Result, Zygote, ring_directory

from distsim.debug.rings.reader import RingReader
from tests.cases.corpus import FAULTS
from tools.benchmarks.arguments import Arguments, known, several

MEDIAN_LIMIT_S, P95_LIMIT_S = 1.0, 2.0


def latency_s(result: Result) -> float | None:
    """Seconds from the last thing that happened before the verdict."""
    if result.told_at is None:
        return None
    events = []
    for path in result.directory.glob("*.ring"):
        records, _ = RingReader(path).since(0)
        events += [int(r["issued"]) / 1e9 for r in records if int(r["issued"]) / 1e9 < result.told_at]
    deaths = [json.loads(path.read_text())["at"] for path in result.directory.glob("exit.*.json")]
    before = [at for at in deaths if at < result.told_at]
    return result.told_at - (min(before) if before else max(events))


def main() -> None:
    parser = Arguments(__doc__)
    timed = [case for case in FAULTS if case.scenario or "hang_after" not in case.fields]
    cases = [case for case in timed if case.runs("check") and "host_stuck" not in case.kinds]
    parser.add_argument("--only", type=several(known([case.name for case in cases])), metavar="NAME,...")
    args = parser.parse_args()
    found: dict[str, float] = {}
    zygote = Zygote()
    for case in cases:
        if args.only and case.name not in args.only:
            continue
        with ring_directory() as folder:
            result = zygote.run(
                case.path,
                case.ranks,
                directory=folder,
                nan=bool(case.fields.get("nan")) or None,
                checksum=bool(case.fields.get("checksum")) or None,
            )
            took_s = latency_s(result)
        if took_s is not None:
            found[case.name] = took_s
    zygote.close()
    for name, took_s in sorted(found.items(), key=lambda item: item[1]):
        print(f"{took_s:6.2f} s  {name}")
    if not found:
        sys.exit("no verdict")
    values = sorted(found.values())
    median_s, p95_s = statistics.median(values), values[int(0.95 * (len(values) - 1))]
    print(
        f"{len(values)} faults: median {median_s:.2f} s (limit {MEDIAN_LIMIT_S:g}), "
        f"95th percentile {p95_s:.2f} s (limit {P95_LIMIT_S:g})"
    )
    sys.exit(int(median_s > MEDIAN_LIMIT_S or p95_s > P95_LIMIT_S))


if __name__ == "__main__":
    main()
