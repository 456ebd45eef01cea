"""Which of two published runs of the same work distsim names as the better one, in tokens/s of a GPU.

    python -m tools.fitting.comparisons            # all pairs of comparisons.csv, about ten minutes
    python -m tools.fitting.comparisons --only MPT # those with MPT in a name

Peer: none, no other simulator says when two runs cannot be told apart. Aim: none of ten wrong, and seven named.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from distsim.cluster import load_cluster
from distsim.planning.tables import may_be_as_good
from distsim.planning.variations import Point
from distsim.scenario.expect.result import Result
from tools.benchmarks.arguments import Arguments
from tools.fitting.rows import Row, read_rows
from tools.fitting.training_steps import SimulatedRow, simulate

__all__ = ["APART", "NAMED", "NO_STEP", "WRONG", "Comparison", "read_pairs", "tokens_of"]

NAMED, APART, WRONG, NO_STEP = "named right", "cannot be told apart", "wrong", "no step"
_NUMBERS = ("--mbs", "--accum", "--seq", "--dp", "--tp", "--pp", "--global-batch-size", "--seq-length")


@dataclass(frozen=True)
class Comparison:
    """Two rows with the same work for a token, and their simulated steps."""

    first: SimulatedRow
    second: SimulatedRow

    @property
    def published(self) -> float:
        """Return the published tokens/s of a GPU of the first row by those of the second."""
        return _rate(self.first.row, self.first.row.step_s) / _rate(self.second.row, self.second.row.step_s)

    @property
    def simulated(self) -> float | None:
        """Return the simulated ratio; None if one of the rows has no step."""
        if self.first.step_s is None or self.second.step_s is None:
            return None
        return _rate(self.first.row, self.first.step_s) / _rate(self.second.row, self.second.step_s)

    @property
    def verdict(self) -> str:
        """Return whether the better one is named, as `distsim tune` and `buy` decide it."""
        ratio = self.simulated
        if ratio is None:
            return NO_STEP
        best, other = (self.first, self.second) if ratio >= 1.0 else (self.second, self.first)
        if may_be_as_good(_point(best), _point(other), max(ratio, 1.0 / ratio)):
            return APART
        return NAMED if (ratio >= 1.0) == (self.published >= 1.0) else WRONG


def tokens_of(row: Row) -> float:
    """Return the tokens of a step of *row* on one GPU, from the flags of its program."""
    numbers = {name: int(row.flags[row.flags.index(name) + 1]) for name in _NUMBERS if name in row.flags}
    if "--global-batch-size" in numbers:  # Megatron-LM's own program
        gpus = row.num_nodes * (row.nproc_per_node or load_cluster(row.on).node.num_gpus)
        return numbers["--global-batch-size"] * numbers["--seq-length"] / gpus
    tokens, dp = math.prod(numbers.get(name, 1) for name in ("--mbs", "--accum", "--seq")), numbers["--dp"]
    return tokens * dp / math.prod(numbers.get(name, 1) for name in ("--dp", "--tp", "--pp"))


def _rate(row: Row, step_s: float) -> float:
    return tokens_of(row) / step_s


def _point(run: SimulatedRow) -> Point:
    figures = {} if run.step_s is None else {"step_s": run.step_s}
    if run.likely_s is not None:
        figures |= {"step_low_s": run.likely_s[0], "step_high_s": run.likely_s[1]}
    return Point({"on": run.row.on}, Result(run.row.name, "", figures=figures))


def read_pairs(path: Path | None = None) -> list[tuple[Row, Row]]:
    """Return the pairs of comparisons.csv; ValueError for a name that no row has."""
    path = path or Path(__file__).parent / "comparisons.csv"
    rows = {row.name: row for row in read_rows()}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pairs = []
    for entry in csv.DictReader(lines):
        lacking = [name for name in entry.values() if name not in rows]
        if lacking:
            raise ValueError(f"{path}: expected the name of a row of rows.csv, got {lacking[0]!r}")
        pairs.append((rows[entry["first"]], rows[entry["second"]]))
    return pairs


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--only", default="", help="pairs with this text in a name")
    args = parser.parse_args()
    pairs = [pair for pair in read_pairs() if any(args.only in row.name for row in pair)]
    runs: dict[str, SimulatedRow] = {}
    verdicts: list[str] = []
    errors = []
    for pair in pairs:
        for row in pair:
            if row.name not in runs:
                runs[row.name] = simulate(row)
        one = Comparison(*(runs[row.name] for row in pair))
        verdicts.append(one.verdict)
        simulated = "" if one.simulated is None else f"{one.simulated:6.3f}"
        if one.simulated is not None:
            errors.append(abs(one.simulated / one.published - 1.0))
        print(f"{one.verdict:20} {one.published:6.3f} {simulated:6}  {pair[0].name} / {pair[1].name}", flush=True)
        for run in (one.first, one.second):
            if run.step_s is None:
                print(f"    {run.row.name}: {(run.failure or run.lacking)[:120]}", flush=True)
    sources = len({row.framework for pair in pairs for row in pair})
    counts = ", ".join(f"{number} {verdict}" for verdict, number in Counter(verdicts).most_common())
    error = f"; the ratio errs by {median(errors):.1%} in the median" if errors else ""
    print(f"{len(pairs)} comparisons of {sources} sources: {counts}{error}")


if __name__ == "__main__":
    main()
