"""Fitting the constants to tables: a robust least-squares fit of log time, held to its starting point by a
prior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench
from distsim.calibration.constants import Constants

__all__ = ["Fitted", "fit", "fitted_names"]

_PRIOR_SIGMA = 0.7
"""A constant may be this far (in its logarithm) from where it started before that costs as much as one
table's worth of one Huber unit."""
_HUBER = 0.15
"""Errors beyond 15 % count linearly: outliers of first touch and switching."""
_STEP = 0.02


@dataclass(frozen=True)
class Fitted:
    """Constants, and the standard deviation of the logarithm of each that was fitted."""

    constants: Constants
    sigma: dict[str, float]
    loss: float


def _residuals(benches: Sequence[Bench], constants: Constants) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log errors of all rows, and the weight of each: every table counts the same in every regime."""
    errors: list[NDArray[np.float64]] = []
    weights: list[NDArray[np.float64]] = []
    machines: dict[tuple[str, str, str], int] = {}
    for bench in benches:
        key = (bench.table.on, bench.table.op, bench.table.launcher)
        machines[key] = machines.get(key, 0) + 1
    for bench in benches:
        bench.use(constants)
        errors.append(np.log(bench.times_us() / bench.measured_us))
        weight = np.zeros(len(bench.table.rows))
        for place in range(3):
            mask = bench.regimes == place
            if mask.any():
                weight[mask] = 1.0 / mask.sum()
        weights.append(weight / machines[(bench.table.on, bench.table.op, bench.table.launcher)])
    return np.concatenate(errors), np.concatenate(weights)


def fit(
    benches: Sequence[Bench],
    start: Constants,
    names: Sequence[str],
    *,
    rounds: int = 12,
    report: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """Change the constants *names* so that simulated and measured times agree best."""
    origin = np.log([start.values[name] for name in names])
    values = origin.copy()
    damping = 1e-2

    def constants(point: NDArray[np.float64]) -> Constants:
        return start.changed(dict(zip(names, np.exp(point).tolist(), strict=True)))

    def loss(error: NDArray[np.float64], weight: NDArray[np.float64], point: NDArray[np.float64]) -> float:
        size = np.abs(error)
        huber = np.where(size < _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER))
        return float(
            (weight * huber).sum()
            + 0.5 * (_HUBER * (point - origin) / _PRIOR_SIGMA) @ (_HUBER * (point - origin) / _PRIOR_SIGMA)
        )

    error, weight = _residuals(benches, constants(values))
    best = loss(error, weight, values)
    normal = np.eye(len(names))
    for number in range(rounds):
        columns = []
        for place in range(len(names)):
            moved = values.copy()
            moved[place] += _STEP
            columns.append((_residuals(benches, constants(moved))[0] - error) / _STEP)
        slope = np.stack(columns, axis=1)
        robust = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-12))
        prior = (_HUBER / _PRIOR_SIGMA) ** 2
        normal = slope.T @ (robust[:, None] * slope) + prior * np.eye(len(names))
        pull = slope.T @ (robust * error) + prior * (values - origin)
        improved = False
        for _ in range(6):
            trial = values - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
            trial = np.clip(trial, origin - 2.5, origin + 2.5)
            trial_error, _ = _residuals(benches, constants(trial))
            trial_loss = loss(trial_error, weight, trial)
            if trial_loss < best:
                gained = best - trial_loss
                values, error, best, damping, improved = trial, trial_error, trial_loss, damping / 3, True
                break
            damping *= 4
        report(f"round {number + 1}: loss {best:.5f}")
        if not improved or gained < 1e-5 * best:
            break
    spread = np.sqrt(np.diag(np.linalg.inv(normal)) * max(float((weight * error**2).sum() / weight.sum()), 1e-6))
    return Fitted(constants(values), dict(zip(names, spread.tolist(), strict=True)), best)


def fitted_names(benches: Sequence[Bench], start: Constants, fixed: Sequence[str]) -> list[str]:
    """The constants that the tables say anything about: a change of each moves at least one time."""
    errors, _ = _residuals(benches, start)
    names: list[str] = []
    for name, value in start.values.items():
        if name in fixed:
            continue
        moved, _ = _residuals(benches, start.changed({name: value * 1.1}))
        if np.abs(moved - errors).max() > 1e-6:
            names.append(name)
    return names
