"""Write the intervals of training steps and the errors of memory anew, from `distsim validate --training --json`.

    distsim validate --training --json > validation.json
    python -m tools.fitting.step_errors validation.json

Peer: none, no other simulator states an interval. Aim: 80 % of rows that nobody has seen lie inside, for which 90 % of
the known rows of left out frameworks have to (training_steps.py, SHARE).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from distsim.collectives.constants import fitted_folder
from distsim.collectives.uncertainty import LAUNCH_BOUND, MANY_GPUS, MANY_NODES, ONE_NODE
from tools.benchmarks.arguments import Arguments
from tools.fitting.rows import source_of
from tools.fitting.training_steps import Residual, held, interval, level, quantile, without

HEAD = """\
# Published / simulated step: the factors between which eight of ten new steps of a regime are to be expected, the
# simulated step always among them. Every framework has the same weight. Of {rows} rows of {frameworks} frameworks, each
# against an interval made without its framework, {share:.0%} lie inside; the median half-width is {half_width:.1%}.
# These are the shares that published steps have in an interval, beside those of collectives and of the GPU's rates.
# With all of them that of 64 GPUs and more is as wide as rows that nobody had seen ask for (AUDITED there).
# Made by `python -m tools.fitting.step_errors` from `distsim validate --training --json`.
"""
RATIO_HEAD = """\
# Two steps of one framework on one kind of node: the factor by which their ratio is off, at most, in eight of ten
# pairs of rows. Program, method and card are common to both. Every framework has the same weight.
"""
CARDS_HEAD = """\
# Sources of the steps that the rows have of each GPU; with fewer than two the interval is widened.
"""
AUDITED = {MANY_GPUS: (0.87, 1.39)}
"""The 10th and the 90th percentile of 38 rows of 8 sources that nobody had seen (an audit of 2026-11-28, which kept
them back): the known rows, in sight of which the model was made, would give half the width. An interval is no narrower,
where collectives and the GPU's rates are as sure as in the median known row.
"""
REGIMES = (ONE_NODE, MANY_NODES, MANY_GPUS, LAUNCH_BOUND)


def text_of(residuals: list[Residual]) -> str:
    """The file that holds the intervals of *residuals*."""
    share = level(residuals)
    known = held(residuals, share)
    head = HEAD.format(rows=known.rows, frameworks=known.frameworks, share=known.share, half_width=known.half_width)
    parts = [head]
    for regime in REGIMES:
        own = [one for one in residuals if one.regime == regime]
        low, high = interval(residuals, regime, share)
        if regime in AUDITED:
            below, above = (median(one.beside[side] for one in own) for side in (0, 1))
            low = min(low, 1.0 - without(1.0 - AUDITED[regime][0], below))
            high = max(high, 1.0 + without(AUDITED[regime][1] - 1.0, above))
        names = len({one.framework for one in own})
        parts.append(f'["{regime}"]\nlow = {low:.4f}\nhigh = {high:.4f}\nrows = {len(own)}\nframeworks = {names}\n')
    return "\n".join(parts)


def memory_text(rows: list[dict[str, Any]]) -> str:
    """The table of errors of the peaks in *rows* of validate's document."""
    errors = [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]
    return f'["memory"]\nmedian = {median(errors):.4f}\nworst = {max(errors):.4f}\nrows = {len(errors)}\n'


def ratio_text(rows: list[dict[str, Any]]) -> str:
    """The table of the error of a ratio of two steps in *rows* of validate's document."""
    errors: dict[str, list[float]] = defaultdict(list)
    for one, other in combinations((row for row in rows if row["step_time_s"] and not row["held_back"]), 2):
        alike = all(a == b for a, b in ((one["framework"], other["framework"]), (_preset(one), _preset(other))))
        if alike and one["source"] == other["source"]:
            errors[one["framework"]].append(abs(_residual(one) - _residual(other)))
    weighted = sorted((error, 1.0 / len(some)) for some in errors.values() for error in some)
    factor = math.exp(quantile(weighted, 0.8))
    pairs = sum(map(len, errors.values()))
    return f'{RATIO_HEAD}["ratio"]\nfactor = {factor:.4f}\npairs = {pairs}\nframeworks = {len(errors)}\n'


def cards_text(rows: list[dict[str, Any]]) -> str:
    """The table of how many sources have steps of each GPU in *rows* of validate's document."""
    sources: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row["step_time_s"] and not row["held_back"]:
            sources[row["gpu"]].add(source_of(row["source"]))
    return f'{CARDS_HEAD}["cards"]\n' + "".join(f"{gpu} = {len(of)}\n" for gpu, of in sorted(sources.items()))


def _preset(row: dict[str, Any]) -> str:
    return str(row["on"]).partition(":")[0]


def _residual(row: dict[str, Any]) -> float:
    return math.log(row["published_step_s"] / row["step_time_s"])


def main() -> None:
    """Read the validation named on the command line, write the file, print it."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "validation", nargs="?", type=Path, default=Path("validation.json"), help="what validate printed"
    )
    rows = json.loads(parser.parse_args().validation.read_text(encoding="utf-8"))["rows"]
    residuals = [
        Residual(row["framework"], row["regime"], _residual(row), tuple(row["beside"]), row["wider"])
        for row in rows
        if row["step_time_s"] and row["regime"] and not row["held_back"]
    ]
    text = f"{text_of(residuals)}\n{memory_text(rows)}\n{ratio_text(rows)}\n{cards_text(rows)}"
    (fitted_folder() / "step_errors.toml").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
