"""Measured against simulated: errors by table and regime, and the bounds they are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench
from distsim.calibration.tables import REGIMES

__all__ = ["BOUNDS", "TABLE_BOUND", "Errors", "Summary", "summarise"]

BOUNDS = (0.25, 0.15, 0.10)
"""Median absolute error over all rows of a regime, at most."""
TABLE_BOUND = 0.40
"""Median absolute error of any table in any regime, at most."""


@dataclass(frozen=True)
class Errors:
    """One table: (simulated - measured) / measured for every row, with the regime of each."""

    bench: Bench
    simulated_us: NDArray[np.float64]

    @property
    def relative(self) -> NDArray[np.float64]:
        """Signed relative errors."""
        found: NDArray[np.float64] = self.simulated_us / self.bench.measured_us - 1.0
        return found

    def of(self, place: int) -> NDArray[np.float64]:
        """The errors in one regime."""
        found: NDArray[np.float64] = self.relative[self.bench.regimes == place]
        return found


@dataclass(frozen=True)
class Summary:
    """All tables together."""

    tables: list[Errors]
    median: tuple[float, ...]
    p90: tuple[float, ...]
    rows: tuple[int, ...]
    broken: list[str]
    """Every bound that does not hold, in words."""


def summarise(benches: Sequence[Bench]) -> Summary:
    """Simulate every table and hold the errors to the bounds."""
    tables = [Errors(bench, bench.times_us()) for bench in benches]
    median, p90, rows, broken = [], [], [], []
    for place, name in enumerate(REGIMES):
        every = np.abs(np.concatenate([errors.of(place) for errors in tables] or [np.zeros(0)]))
        rows.append(len(every))
        median.append(float(np.median(every)) if len(every) else 0.0)
        p90.append(float(np.percentile(every, 90)) if len(every) else 0.0)
        if median[place] > BOUNDS[place]:
            broken.append(f"{name}: median error {median[place]:.1%}, expected at most {BOUNDS[place]:.0%}")
        for errors in tables:
            some = np.abs(errors.of(place))
            if len(some) and float(np.median(some)) > TABLE_BOUND:
                broken.append(
                    f"{errors.bench.table.name}, {name}: median error {float(np.median(some)):.1%}, "
                    f"expected at most {TABLE_BOUND:.0%}"
                )
    return Summary(tables, tuple(median), tuple(p90), tuple(rows), broken)
