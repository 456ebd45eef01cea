"""Fits the constants to tables by robust least squares of log time with priors.

The prior of a constant is its own, if it has one, or else the constant that its table would inherit. So a fabric with
few tables stays close to the others, and a fabric without any equals them.

A machine may differ from all others on its fabric: its rate and what it loses with more nodes are the fabric's times
factors of its own (`OWN_SPREAD`), with 1 as the common prior. They are fitted together with the
constants and then left behind, so that a slow cluster does not slow down the next one (a hierarchical model; its
variances are given, not estimated).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench, MeasuredTable
from distsim.collectives.constants import Constants

__all__ = ["HUBER", "FitEnd", "Fitted", "data_file", "fit", "fitted_names"]

Vector = NDArray[np.float64]

HUBER = 0.15
"""Error above which a point counts linearly, because first touch and switching cause outliers."""
_STEP = 0.02
_STRENGTH = 0.07
"""Weight of a constant's distance of one spread from its prior, in errors of one machine's class of sizes.

This weight and the spreads were chosen so that machines that were left out are predicted best.
"""
_ALONE = 0.4
"""That weight for a constant that only one machine uses, because no other machine is predicted with it."""
_SPREAD = {
    "message_LL": 3.0,
    "message_LL128": 3.0,
    "message_Simple": 2.0,
    "message_pair": 1.0,
    "hop": 1.0,
    "ring_LL": 0.5,
    "tree_more": 0.5,
    "remote": 0.8,
    "remote_tiny": 1.0,
    "channel_LL": 0.5,
    "efficiency": 0.15,
    "tree_share": 0.12,
    "p2p_efficiency": 0.8,
    "loss": 0.7,
    "ring_loss": 0.7,
}
"""Spread of the logarithm of a constant around its prior, by key."""
_USUAL_SPREAD = 0.25
OWN_SPREAD = {"efficiency": 0.03, "loss": 1.5, "ring_loss": 1.5}
"""Spread of the logarithm of a machine's own factor on a fabric's constant, by key.

A hop of its own made machines that were left out, and more nodes, worse predicted: 8.0 % below 64 KiB with a spread of
0.3, where the common hop has 7.5 %.
"""
_OWN_STRENGTH = 0.07
"""Weight of a machine's own factor, like `_STRENGTH`."""
_LEAST = 1e-3


@dataclass(frozen=True)
class FitEnd:
    """Result of a fit: errors of all rows, their derivatives by constant, and the prior of each constant.

    Behind the constants *names*, `values`, `slope`, `hold` and `held` have the machines' own factors.
    """

    names: Sequence[str]
    tables: Sequence[MeasuredTable]
    values: Vector
    """Logarithms of the constants."""
    error: Vector
    slope: Vector
    weight: Vector
    hold: Vector
    held: Vector


@dataclass(frozen=True)
class Fitted:
    """Constants, and the standard deviation of the logarithm of each that was fitted."""

    constants: Constants
    sigma: dict[str, float]
    loss: float
    end: FitEnd
    own: dict[str, dict[str, float]]
    """The factors of each machine's own, by constant."""


class _Recording(Constants):
    """Constants that record which of them were used."""

    def __init__(self, constants: Constants) -> None:
        super().__init__(constants.values, constants.like)
        self.asked: set[str] = set()

    def get(self, table: str, key: str) -> float:
        while f"{table}.{key}" not in self.values:
            table = self.like[table]
        self.asked.add(f"{table}.{key}")
        return self.values[f"{table}.{key}"]


class _Problem:
    """Tables, their weights, and what was simulated of each with which constants."""

    def __init__(self, benches: Sequence[Bench]) -> None:
        self.benches = benches
        self.measured = [bench.measured_us for bench in benches]
        self.weight = np.concatenate(_weights(benches)) if benches else np.zeros(0)

    def errors(self, of: Callable[[str], Constants]) -> tuple[list[Vector], list[set[str]]]:
        """Return the log errors of each table's rows, and the constants that each table uses, with the constants *of*
        its machine.
        """
        errors, constants_asked = [], []
        for bench, measured in zip(self.benches, self.measured, strict=True):
            recording = _Recording(of(bench.table.machine))
            bench.use(recording)
            errors.append(np.log(bench.times_us() / measured))
            constants_asked.append(recording.asked)
        return errors, constants_asked

    def slope(
        self, of: Callable[[str], Constants], name: str, errors: list[Vector], constants_used: list[set[str]]
    ) -> Vector:
        """Return the derivative of the errors by the logarithm of one constant; only tables that read it are
        simulated."""
        columns: list[Vector] = []
        for bench, measured, error, names in zip(self.benches, self.measured, errors, constants_used, strict=True):
            if name not in names:
                columns.append(np.zeros(len(error)))
                continue
            constants = of(bench.table.machine)
            bench.use(constants.changed({name: constants.values[name] * float(np.exp(_STEP))}))
            columns.append((np.log(bench.times_us() / measured) - error) / _STEP)
        return np.concatenate(columns)


def _weights(benches: Sequence[Bench]) -> list[Vector]:
    """Return a weight for every row. In each regime all machines weigh the same; within a machine, so do its pairs
    of operation and number of nodes.
    """
    cells: dict[tuple[str, int], dict[tuple[str, int, str], int]] = {}
    for bench in benches:
        table = bench.table
        for bench_regime in set(bench.regimes.tolist()):
            runs = cells.setdefault((table.machine, bench_regime), {})
            run = (table.op, table.nnodes, table.on)
            runs[run] = runs.get(run, 0) + 1
    result = []
    for bench in benches:
        table, weight = bench.table, np.zeros(len(bench.table.rows))
        for bench_regime in set(bench.regimes.tolist()):
            runs = cells[(table.machine, bench_regime)]
            mask = bench.regimes == bench_regime
            weight[mask] = len(runs) ** 0.75 / len(runs) / runs[(table.op, table.nnodes, table.on)] / mask.sum()
        result.append(weight)
    return result


def _priors(
    start: Constants, names: Sequence[str], priors: Mapping[str, float], alone: Collection[str] = ()
) -> tuple[Vector, Vector]:
    """Return the rows of a linear system that hold log constants to their priors, or to those they would borrow; the
    constants *alone* less so.
    """
    places = {name: index for index, name in enumerate(names)}
    rows, values = np.zeros((len(names), len(names))), np.zeros(len(names))
    for index, name in enumerate(names):
        table, _, key = name.rpartition(".")
        strength = _STRENGTH / _SPREAD.get(key, _USUAL_SPREAD) * (_ALONE if name in alone else 1.0)
        rows[index, index] = strength
        if name in priors:
            values[index] = strength * np.log(priors[name])
            continue
        while table in start.like:
            table = start.like[table]
            if f"{table}.{key}" in start.values:
                break
        below = f"{table}.{key}"
        if below in places and below != name:
            rows[index, places[below]] = -strength
        else:
            values[index] = strength * np.log(start.values[below])
    return rows, values


def _alone(machines: Sequence[str], constants_used: Sequence[set[str]]) -> set[str]:
    """Return the constants that the tables of one machine alone ask for."""
    owners: dict[str, set[str]] = {}
    for machine, names in zip(machines, constants_used, strict=True):
        for name in names:
            owners.setdefault(name, set()).add(machine)
    return {name for name, users in owners.items() if len(users) == 1}


def _own_factors(
    machines: Sequence[str], constants_used: Sequence[set[str]], names: Collection[str]
) -> list[tuple[str, str]]:
    """Return the pairs of a machine and a constant of its fabric that other machines use as well."""
    alone = _alone(machines, constants_used)
    pairs = {
        (machine, name)
        for machine, used in zip(machines, constants_used, strict=True)
        for name in used
        if name in names and name not in alone and name.rpartition(".")[2] in OWN_SPREAD
    }
    return sorted(pairs)


def fit(
    benches: Sequence[Bench],
    start: Constants,
    names: Sequence[str],
    *,
    rounds: int = 12,
    priors: Mapping[str, float] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """Change the constants *names* so that simulated and measured times agree best.

    *priors* are the values, by name, from which a constant should not move far; the others use the value that their
    table would inherit, or their start value.
    """
    problem = _Problem(benches)
    given = dict(priors) if priors is not None else {name: start.values[name] for name in names}
    damping = 1e-2

    machines = [bench.table.machine for bench in benches]
    row_machines = np.concatenate([np.full(len(bench.table.rows), bench.table.machine) for bench in benches])
    _, used = problem.errors(lambda _: start)
    own = _own_factors(machines, used, names)
    places = {name: index for index, name in enumerate(names)}
    values = np.concatenate((np.log([start.values[name] for name in names]), np.zeros(len(own))))
    origin = values.copy()

    def constants(point: Vector) -> Callable[[str], Constants]:
        common = start.changed(dict(zip(names, np.exp(point[: len(names)]).tolist(), strict=True)))
        factors = _by_machine(own, point[len(names) :])

        def of(machine: str) -> Constants:
            mine = factors.get(machine, {})
            return common.changed({name: common.values[name] * factor for name, factor in mine.items()})

        return of

    def slopes(point: Vector) -> Vector:
        common = np.stack([problem.slope(constants(point), name, errors, used) for name in names], axis=1)
        mine = [common[:, places[name]] * (row_machines == machine) for machine, name in own]
        return np.column_stack((common, *mine))

    def loss(error: Vector, point: Vector) -> float:
        size = np.abs(error)
        huber = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        apart = hold @ point - held
        return float((problem.weight * huber).sum() + 0.5 * apart @ apart)

    errors, used = problem.errors(constants(values))
    hold, held = _priors(start, names, given, _alone(machines, used))
    spreads = np.array([OWN_SPREAD[name.rpartition(".")[2]] for _, name in own])
    hold = np.block(
        [[hold, np.zeros((len(hold), len(own)))], [np.zeros((len(own), len(hold))), np.diag(_OWN_STRENGTH / spreads)]]
    )
    held = np.concatenate((held, np.zeros(len(own))))
    error = np.concatenate(errors)
    best = loss(error, values)
    normal, gained = np.eye(len(values)), 0.0
    for number in range(rounds):
        slope = slopes(values)
        robust = problem.weight * np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-12))
        normal = slope.T @ (robust[:, None] * slope) + hold.T @ hold
        pull = slope.T @ (robust * error) + hold.T @ (hold @ values - held)
        improved = False
        for _ in range(6):
            trial = values - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
            trial = np.clip(trial, origin - 4.0, origin + 4.0)
            trial_errors, trial_asked = problem.errors(constants(trial))
            trial_loss = loss(np.concatenate(trial_errors), trial)
            if trial_loss < best:
                gained = best - trial_loss
                values, errors, used, best = trial, trial_errors, trial_asked, trial_loss
                error, damping, improved = np.concatenate(errors), damping / 3, True
                break
            damping *= 4
        report(f"round {number + 1}: loss {best:.5f}")
        if not improved or gained < _LEAST * best:
            break
    end = FitEnd(names, [bench.table for bench in benches], values, error, slopes(values), problem.weight, hold, held)
    scale = float((problem.weight * np.minimum(np.abs(error), 1.0) ** 2).sum() / problem.weight.sum())
    spread = np.sqrt(np.diag(np.linalg.inv(normal)) * max(scale, 1e-6))
    common = start.changed(dict(zip(names, np.exp(values[: len(names)]).tolist(), strict=True)))
    sigma = dict(zip(names, spread[: len(names)].tolist(), strict=True))
    return Fitted(common, sigma, best, end, _by_machine(own, values[len(names) :]))


def _by_machine(own: Sequence[tuple[str, str]], logs: Vector) -> dict[str, dict[str, float]]:
    factors: dict[str, dict[str, float]] = {}
    for (machine, name), factor in zip(own, np.exp(logs).tolist(), strict=True):
        factors.setdefault(machine, {})[name] = factor
    return factors


def fitted_names(benches: Sequence[Bench], start: Constants, fixed: Collection[str]) -> list[str]:
    """Return the constants that the tables say anything about, in the order of the data file."""
    _, used = _Problem(benches).errors(lambda _: start)
    return [name for name in start.values if name in set().union(*used) and name not in fixed]


_ENTRY = re.compile(r"^(\w+) = \{ value = [^,]+, (prior = [^,]+, )?uncertainty = [^,]+, source = (\".*\") \}$")


def data_file(path: Path, fitted: Fitted, source: str | None = None) -> str:
    """Return the text of *path* with the fitted values, their uncertainty, and *source* as their source."""
    lines: list[str] = []
    table = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        entry = _ENTRY.match(line)
        name = f"{table}.{entry[1]}" if entry else ""
        if entry and name in fitted.sigma:
            value, sigma = fitted.constants.values[name], fitted.sigma[name]
            prior, origin = entry[2] or "", entry[3] if source is None else f'"{source}"'
            line = f"{entry[1]} = {{ value = {value:.4g}, {prior}uncertainty = {sigma:.2g}, source = {origin} }}"
        lines.append(line)
    return "\n".join(lines) + "\n"
