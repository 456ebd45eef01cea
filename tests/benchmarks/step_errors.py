"""Write the intervals of training steps and the errors of memory anew, from `distsim validate --training --json`.

    distsim validate --training --json > validation.json
    python -m tests.benchmarks.step_errors validation.json

Peer: none, no other simulator states an interval. Aim: 80 % of the rows of left out sources lie inside.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from distsim.calibration.constants import data_folder
from distsim.calibration.training.steps import Residual, held, interval, level, source_of
from tests.benchmarks.arguments import Arguments

HEAD = """\
# Published / simulated step: the factors between which eight of ten measured steps of a regime are to be expected, the
# simulated step always among them. Every source has the same weight. Of {rows} rows of {sources} sources, each against
# intervals made without its source, {share:.0%} lie inside; the median half-width is {half_width:.1%}.
# Made by `python -m tests.benchmarks.step_errors` from `distsim validate --training --json`.
"""
REGIMES = ("one node", "many nodes", "near launch-bound")


def text_of(residuals: list[Residual]) -> str:
    """The file that holds the intervals of *residuals*."""
    share = level(residuals)
    known = held(residuals, share)
    head = HEAD.format(rows=known.rows, sources=known.sources, share=known.share, half_width=known.half_width)
    parts = [head]
    for regime in REGIMES:
        own = [one for one in residuals if one.regime == regime]
        low, high = interval(residuals, regime, share)
        sources = len({one.source for one in own})
        parts.append(f'["{regime}"]\nlow = {low:.4f}\nhigh = {high:.4f}\nrows = {len(own)}\nsources = {sources}\n')
    return "\n".join(parts)


def memory_text(rows: list[dict[str, Any]]) -> str:
    """The table of errors of the peaks in *rows* of validate's document."""
    errors = [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]
    return f'["memory"]\nmedian = {median(errors):.4f}\nworst = {max(errors):.4f}\nrows = {len(errors)}\n'


def main() -> None:
    """Read the validation named on the command line, write the file, print it."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "validation", nargs="?", type=Path, default=Path("validation.json"), help="what validate printed"
    )
    rows = json.loads(parser.parse_args().validation.read_text(encoding="utf-8"))["rows"]
    residuals = [
        Residual(source_of(row["source"]), row["regime"], math.log(row["published_step_s"] / row["step_time_s"]))
        for row in rows
        if row["step_time_s"] and row["regime"]
    ]
    text = f"{text_of(residuals)}\n{memory_text(rows)}"
    (data_folder() / "training" / "step_errors.toml").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
