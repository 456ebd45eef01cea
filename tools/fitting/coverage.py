"""How far from its prediction a machine that no fit has seen is to be expected, and how many such machines are there.

Where eight of ten errors lie is known well where many machines were measured and hardly at all where one was. So it
is told apart by size, kind of fabric (inside a node, InfiniBand, all others) and fabric, one after the other, and
each tells so much as machines stand behind it. Numbers of nodes and operations are not: told apart, the widths are
wider at the same share held, as they say more of the machines that are there than of the next. How much further they
have to reach is asked of machines that were left out here, too: each measured against widths that its own errors had
no part in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distsim.calibration.compare import REGIMES, regime
from distsim.calibration.predictions import Prediction, weighted_quantile
from distsim.collectives.uncertainty import OTHERS

__all__ = ["HELD", "Covered", "Error", "Widths", "covered", "left_out_errors", "ratios", "weighted"]

_HOLD = 2.0
"""Number of machines with the weight of the assumption that a fabric is like all others."""
_SHARE = 0.8
"""Share of the errors that an interval should contain."""
_LEAST = 5e-3
"""Smallest relative error that counts, because measured times are not more exact."""
HELD = 0.805
"""Share of the errors of unknown machines that intervals should contain.

It is slightly more than eight of ten, because this one figure was chosen with all machines in sight.
"""


@dataclass(frozen=True, slots=True)
class Error:
    """One measured point of a machine that was left out."""

    machine: str
    fabric: str
    size: str
    value: float
    """Logarithm of measured / predicted."""

    @property
    def key(self) -> tuple[str, str]:
        """Return the key under which the width of its interval is stored."""
        return self.fabric, self.size


def weighted(values: Iterable[tuple[str, float]], share: float) -> float:
    """Return the quantile of values by machine, each machine with the same weight."""
    return weighted_quantile(_by_machine(values), share)


def _by_machine(values: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    values_of: dict[str, list[float]] = {}
    for machine, value in values:
        values_of.setdefault(machine, []).append(value)
    return values_of


def _kind(fabric: str) -> str:
    return fabric if fabric in ("none", "ib") else OTHERS


class Widths:
    """Interval widths that hold about eight of ten errors."""

    def __init__(self, errors: Sequence[Error]) -> None:
        self._all = 0.0
        self._more: list[dict[str, float]] = [{} for _ in _told("", "")]
        if not errors:
            return
        left = [math.log(max(abs(one.value), _LEAST)) for one in errors]
        self._all = weighted(((one.machine, value) for one, value in zip(errors, left, strict=True)), _SHARE)
        left = [value - self._all for value in left]
        names_of = [_told(*one.key) for one in errors]
        for i, more in enumerate(self._more):
            groups: dict[str, list[tuple[str, float]]] = {}
            for one, names, value in zip(errors, names_of, left, strict=True):
                groups.setdefault(names[i], []).append((one.machine, value))
            for name, values in groups.items():
                machines = len({machine for machine, _ in values})
                more[name] = weighted(values, _SHARE) * machines / (machines + _HOLD)
            left = [value - more[names[i]] for names, value in zip(names_of, left, strict=True)]

    def of(self, fabric: str, size: str) -> float:
        """Return the half width, as |log (measured / predicted)|, that should contain eight of ten rows."""
        corrections = zip(self._more, _told(fabric, size), strict=True)
        return math.exp(self._all + sum(more.get(name, 0.0) for more, name in corrections))


def _told(fabric: str, size: str) -> tuple[str, ...]:
    return size, _kind(fabric), fabric


def ratios(errors: Sequence[Error]) -> list[tuple[str, float]]:
    """Return the error of each point by machine, as ratios to medians that exclude the machine."""
    result: list[tuple[str, float]] = []
    for machine in dict.fromkeys(error.machine for error in errors):
        others = Widths([error for error in errors if error.machine != machine])
        mine = [error for error in errors if error.machine == machine]
        of = {key: others.of(*key) for key in {one.key for one in mine}}
        result += [(machine, abs(one.value) / of[one.key]) for one in mine]
    return result


@dataclass(frozen=True, slots=True)
class Covered:
    """Coverage of the intervals of machines that were left out of the fit; every machine has the same weight."""

    share: float
    """Share of the measured points that lie in their interval."""
    alone: float
    """That share for intervals that used none of the machine's own errors, as for a machine that was never measured."""
    half_width: float
    """Median half-width of those intervals, relative to the predicted time."""
    error: float
    """Median of |predicted / measured - 1|."""


def covered(predictions: Sequence[Prediction]) -> Covered | None:
    """Return the intervals of machines that were left out; None if there are not two of these."""
    errors = left_out_errors(predictions)
    if len({error.machine for error in errors}) < 2:
        return None
    widths, others = Widths(errors), ratios(errors)
    reach = weighted(others, HELD)
    inside = [(one.machine, float(abs(one.value) <= reach * widths.of(*one.key))) for one in errors]
    alone: list[tuple[str, float]] = []
    half: list[tuple[str, float]] = []
    for machine in dict.fromkeys(error.machine for error in errors):
        far = weighted([one for one in others if one[0] != machine], HELD)
        mine = [one for one in errors if one.machine == machine]
        alone += [(machine, float(ratio <= far)) for whose, ratio in others if whose == machine]
        unseen = Widths([one for one in errors if one.machine != machine])
        of = {key: unseen.of(*key) for key in {one.key for one in mine}}
        half += [(machine, math.sinh(far * of[one.key])) for one in mine]
    wrong = [(one.machine, abs(math.exp(-one.value) - 1.0)) for one in errors]
    return Covered(_mean(inside), _mean(alone), weighted(half, 0.5), weighted(wrong, 0.5))


def _mean(values: Sequence[tuple[str, float]]) -> float:
    """Return the mean over machines of each machine's mean."""
    return float(np.mean([np.mean(each) for each in _by_machine(values).values()]))


def left_out_errors(predictions: Sequence[Prediction]) -> list[Error]:
    """Return every measured point of a machine that was left out."""
    result: list[Error] = []
    for one in predictions:
        if one.left_out_us is None:
            continue
        table = one.bench.table
        values = np.log(one.bench.measured_us / one.left_out_us).tolist()
        result += [
            Error(table.machine, one.fabric, REGIMES[regime(row.size_bytes)], value)
            for row, value in zip(table.rows, values, strict=True)
        ]
    return result
