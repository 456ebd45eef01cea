"""Published against simulated steps: their spread, and the bounds they are held to."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from distsim.calibration.training.runs import Run

__all__ = [
    "LARGEST",
    "MEDIANS",
    "MEMORY",
    "SHARE",
    "Held",
    "Residual",
    "Summary",
    "held",
    "interval",
    "level",
    "residuals_of",
    "source_of",
    "summarise",
]

# -- Where a measured step lies: the spread of published steps around simulated ones, by regime and source.
#
# Every source has the same weight, since the rows of one share their framework, machine and way to measure. A regime
# that few sources have is held to the others: those count as much as `HOLD` sources of its own; what the host bounds
# is a matter of its own. How far the quantiles reach is asked of sources that were left out: as far as `SHARE` of them
# needs, each against intervals that it had no part in.

SHARE = 0.8
"""Of rows of a source that nobody fitted, in their interval."""
HOLD = 2.0
"""So many sources say that a regime is as all are."""
BOUND_BY_HOST = "near launch-bound"
"""The regime whose errors say nothing of the others, nor theirs of it, unless there is nothing else."""
LEVELS = tuple(0.80 + 0.01 * step for step in range(20))
"""Shares of the known residuals between the two ends of an interval; more where too few of the unknown lie inside."""
_REPOSITORY = re.compile(r"github(?:\.com/|:)([\w.-]+/[\w.-]+)")
_PAPER = re.compile(r"arXiv:[\d.]+")


@dataclass(frozen=True, slots=True)
class Residual:
    """One published step."""

    source: str
    regime: str
    value: float
    """Logarithm of published / simulated."""


@dataclass(frozen=True, slots=True)
class Held:
    """How well intervals hold the rows of sources that they had no part in."""

    share: float
    rows: int
    sources: int
    half_width: float
    """The median, of the simulated step."""


def source_of(text: str) -> str:
    """The repository or paper that a row's source names, whatever the file in it."""
    match = _REPOSITORY.search(text) or _PAPER.search(text)
    return match.group(match.lastindex or 0) if match else text


def residuals_of(runs: Sequence[Run]) -> list[Residual]:
    """Those of the rows that ran."""
    return [
        Residual(source_of(run.row.source), run.regime, math.log(run.row.step_s / run.step_s))
        for run in runs
        if run.step_s and run.regime
    ]


def interval(residuals: Sequence[Residual], regime: str, share: float) -> tuple[float, float]:
    """Factors of a simulated step between which *share* of the measured ones lie; the simulated one always does."""
    kin = [one for one in residuals if one.regime == regime or BOUND_BY_HOST not in (one.regime, regime)]
    kin = kin or list(residuals)
    own = Counter(one.source for one in kin if one.regime == regime)
    others = Counter(one.source for one in kin if one.regime != regime)
    held = HOLD / max(1, len(others))
    weighted = sorted(
        (one.value, 1.0 / own[one.source] if one.regime == regime else held / others[one.source]) for one in kin
    )
    low, high = (_quantile(weighted, (1.0 + sign * share) / 2) for sign in (-1, 1))
    return math.exp(min(low, 0.0)), math.exp(max(high, 0.0))


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """The value below which *share* of the weight lies, between sorted values in a straight line."""
    total, reached = sum(weight for _, weight in weighted), 0.0
    before = None
    for value, weight in weighted:
        at = (reached + weight / 2) / total
        if at >= share:
            return value if before is None else before[0] + (value - before[0]) * (share - before[1]) / (at - before[1])
        before, reached = (value, at), reached + weight
    return weighted[-1][0]


def held(residuals: Sequence[Residual], share: float) -> Held:
    """How many rows lie in the interval of quantiles at *share*, made without their source."""
    inside, widths = 0, []
    sources = {one.source for one in residuals}
    for source in sources:
        known = [one for one in residuals if one.source != source]
        for one in residuals:
            if one.source == source and known:
                low, high = interval(known, one.regime, share)
                inside += low <= math.exp(one.value) <= high
                widths.append((high - low) / 2)
    rows = max(1, len(widths))
    return Held(inside / rows, len(widths), len(sources), median(widths) if widths else math.inf)


def level(residuals: Sequence[Residual]) -> float:
    """The least of `LEVELS` at which `SHARE` of the rows of left out sources lie inside; the last where none does."""
    return next((share for share in LEVELS if held(residuals, share).share >= SHARE), LEVELS[-1])


# -- Published against simulated steps, and the bounds they are held to.

MEDIANS = {"one node": 0.08, "many nodes": 0.12}
"""Median absolute error of the step, at most."""
LARGEST = 0.30
"""Absolute error of any step, at most."""
MEMORY = 0.10
"""Absolute error of any peak of memory, at most."""


@dataclass(frozen=True)
class Summary:
    """All rows together."""

    runs: Sequence[Run]
    medians: dict[str, float | None]
    """By "one node" and "many nodes"; None without a row."""
    memory: float | None
    """Median absolute error of the peaks that were published."""
    unseen: float | None
    """Median absolute error of the step of those that nobody looked at before; None without one."""
    held: Held | None
    """How well the intervals of left out sources hold their rows; None where all rows have one source."""
    broken: list[str]
    """Every bound that does not hold, in words."""

    def of(self, place: str) -> list[Run]:
        """The runs on one node, or on many."""
        return [run for run in self.runs if _place(run) == place]


def summarise(runs: Sequence[Run]) -> Summary:
    """Medians, and the bounds that are broken: a row that did not run breaks one."""
    broken = [f"{run.row.name}: it did not run: {run.failure}" for run in runs if run.failure]
    medians: dict[str, float | None] = {}
    for place, bound in MEDIANS.items():
        errors = [abs(run.step_error) for run in runs if _place(run) == place and run.step_error is not None]
        found = medians[place] = median(errors) if errors else None
        if found is not None and found > bound:
            broken.append(f"the step on {place}: median error {found:.1%}, at most {bound:.0%}")
    for run in runs:
        if run.step_error is not None and abs(run.step_error) > LARGEST:
            broken.append(f"{run.row.name}: the step is {run.step_error:+.1%} off, at most {LARGEST:.0%}")
        if run.memory_error is not None and abs(run.memory_error) > MEMORY:
            broken.append(f"{run.row.name}: memory is {run.memory_error:+.1%} off, at most {MEMORY:.0%}")
    memory = [abs(run.memory_error) for run in runs if run.memory_error is not None]
    unseen = [abs(run.step_error) for run in runs if run.row.unseen and run.step_error is not None]
    residuals = residuals_of(runs)
    several = len({one.source for one in residuals}) > 1
    return Summary(
        runs,
        medians,
        median(memory) if memory else None,
        median(unseen) if unseen else None,
        held(residuals, level(residuals)) if several else None,
        broken,
    )


def _place(run: Run) -> str:
    return "one node" if run.row.num_nodes == 1 else "many nodes"
