"""Measured against simulated: errors by table and regime, and the bounds they are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench
from distsim.calibration.predictions.left_out import Prediction
from distsim.calibration.predictions.split import split, weighted_median, worst_machines
from distsim.calibration.tables import REGIMES

__all__ = ["BOUNDS", "MACHINE_BOUND", "Errors", "Summary", "summarise"]

BOUNDS = {
    "machine left out": (0.12, 0.15, 0.06),
    "more nodes left out": (0.12, 0.15, 0.10),
    "fitted": (0.06, 0.10, 0.05),
}
"""Median absolute error by regime of size, every machine with the same weight, at most."""
_LEAST_MACHINES = 5
"""A median over fewer is held to nothing."""
MACHINE_BOUND = {"machine left out": 0.40, "fitted": 0.25}
"""Median absolute error of any machine in any regime, at most."""


@dataclass(frozen=True)
class Errors:
    """One table: (simulated - measured) / measured for every row, with the regime of each."""

    bench: Bench
    simulated_us: NDArray[np.float64]
    use: str = "left"
    """left: with constants that saw nothing of the machine; fit: with those that come with distsim."""

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


def summarise(predictions: Sequence[Prediction]) -> Summary:
    """The errors with each table's machine left out (as fitted, where it is not among the fitted machines), and what
    of the bounds does not hold."""
    tables = [
        Errors(one.bench, one.fitted_us, "fit") if one.left_out_us is None else Errors(one.bench, one.left_out_us)
        for one in predictions
    ]
    median, p90, rows = [], [], []
    for place in range(len(REGIMES)):
        machines: dict[str, list[float]] = {}
        for errors in tables:
            machines.setdefault(errors.bench.table.machine, []).extend(np.abs(errors.of(place)).tolist())
        machines = {machine: each for machine, each in machines.items() if each}
        every = [value for each in machines.values() for value in each]
        rows.append(len(every))
        median.append(weighted_median(machines) if machines else 0.0)
        p90.append(float(np.percentile(every, 90)) if every else 0.0)
    return Summary(tables, tuple(median), tuple(p90), tuple(rows), list(_broken(predictions)))


def _broken(predictions: Sequence[Prediction]) -> Iterator[str]:
    for cell in split(predictions):
        if cell.fabric != "all" or cell.machines < _LEAST_MACHINES:
            continue
        for name, median, bound in zip(REGIMES, cell.median, BOUNDS[cell.kind], strict=True):
            if median is not None and median > bound:
                yield f"{cell.kind}, {name}: median error {median:.1%}, expected at most {bound:.0%}"
    for kind, bound in MACHINE_BOUND.items():
        for place, name in enumerate(REGIMES):
            worst = worst_machines(predictions, kind, place)
            for median, machine in worst if kind == "fitted" or len(worst) >= _LEAST_MACHINES else ():
                if median > bound:
                    yield f"{kind}, {machine}, {name}: median error {median:.1%}, expected at most {bound:.0%}"
