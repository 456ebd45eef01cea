"""How wrong predictions are, as `distsim.collectives.uncertainty` reads it: `errors.csv`, made by `python -m
distsim.calibration.refit`, and how well the intervals made of it hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.predictions.left_out import Prediction
from distsim.calibration.predictions.widths import Error, Widths, ratios, weighted
from distsim.calibration.tables import REGIMES, regime
from distsim.collectives.uncertainty import NODE_CLASSES, OTHERS

__all__ = ["Covered", "covered", "errors_csv"]

_FIELDS = ("origin", "fabric", "nodes", "size", "low", "high", "rows", "machines", "presets")
_LEAST_ROWS = 8
_HELD = 0.805
"""Of the errors of machines that the widths knew nothing of; a little more than eight of ten, since this one figure
knew of all."""
_HELD_FITTED = 0.83
"""Of a fitted machine's own; a little more than eight of ten, since the next run is none of those."""
Machines = dict[str, list[float]]
"""Values by machine, each of which counts the same."""
Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Covered:
    """How well the intervals of a cluster that nobody fitted hold, every machine with the same weight."""

    share: float
    """Of the measured points that lie in the interval."""
    alone: float
    """The same with intervals that saw none of the machine's own errors: what a machine nobody has measured gets."""
    half_width: float
    """Of those, median, of the predicted time."""
    error: float
    """Median of |predicted / measured - 1|."""


def errors_csv(predictions: Sequence[Prediction]) -> str:
    """The text of errors.csv: intervals of measured / predicted that hold eight of ten."""
    lines = [
        "# measured / predicted time: an interval that holds eight of ten, every machine with the same weight.",
        "# fitted: the narrowest around errors with all tables, and with those of one and two nodes, for presets that",
        "# are one machine. left out: about predictions with constants that saw nothing of the machine, as wide as",
        "# needed where the interval saw nothing of it either (predictions/widths.py). rows, machines: of the fabric",
        "# in that size. others: all fabrics but InfiniBand. Made by",
        "# `python -m distsim.calibration.refit`.",
        ",".join(_FIELDS),
        *_fitted_lines(predictions),
        *_left_out_lines(_left_out(predictions)),
    ]
    return "\n".join(lines) + "\n"


def _fitted_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    owners: dict[str, set[str]] = {}
    presets: dict[Key, set[str]] = {}
    for one in predictions:
        table = one.bench.table
        preset = one.bench.compiler.cluster.name.partition(":")[0]
        owners.setdefault(preset, set()).add(table.machine)
        for row in table.rows:
            presets.setdefault(("fitted", one.fabric, one.nodes, REGIMES[regime(row.size_bytes)]), set()).add(preset)
    for key, machines in sorted(_fitted(predictions).items()):
        rows = sum(len(values) for values in machines.values())
        if rows < _LEAST_ROWS:
            continue
        low, high = _narrowest(machines)
        # A preset that stands for machines of several owners does for yet another's: that one was not fitted.
        whose = " ".join(sorted(one for one in presets.get(key, ()) if len(owners[one]) == 1))
        yield f"{','.join(key)},{low:.3f},{high:.3f},{rows},{len(machines)},{whose}"


def _left_out_lines(errors: Sequence[Error]) -> Iterator[str]:
    if not errors:
        return
    widths, reach = Widths(errors), weighted(ratios(errors), _HELD)
    for fabric in (*sorted({error.fabric for error in errors}), OTHERS):
        for nodes in NODE_CLASSES[:1] if fabric == "none" else NODE_CLASSES[1:]:
            for size in REGIMES:
                some = [one for one in errors if one.size == size and _is_of(one, fabric)]
                if not some:
                    continue
                machines = len({one.machine for one in some})
                far = math.exp(reach * widths.of(fabric, size))
                yield f"left out,{fabric},{nodes},{size},{1 / far:.3f},{far:.3f},{len(some)},{machines},"


def _is_of(error: Error, fabric: str) -> bool:
    return error.fabric == fabric or (fabric == OTHERS and error.fabric not in ("none", "ib"))


def covered(predictions: Sequence[Prediction]) -> Covered | None:
    """The intervals of machines that were left out; None where there are not two of these."""
    errors = _left_out(predictions)
    if len({error.machine for error in errors}) < 2:
        return None
    widths, others = Widths(errors), ratios(errors)
    reach = weighted(others, _HELD)
    inside = [(one.machine, float(abs(one.value) <= reach * widths.of(*one.key))) for one in errors]
    alone: list[tuple[str, float]] = []
    half: list[tuple[str, float]] = []
    for machine in dict.fromkeys(error.machine for error in errors):
        far = weighted([one for one in others if one[0] != machine], _HELD)
        mine = [one for one in errors if one.machine == machine]
        alone += [(machine, float(ratio <= far)) for whose, ratio in others if whose == machine]
        unseen = Widths([one for one in errors if one.machine != machine])
        of = {key: unseen.of(*key) for key in {one.key for one in mine}}
        half += [(machine, math.sinh(far * of[one.key])) for one in mine]
    wrong = [(one.machine, abs(math.exp(-one.value) - 1.0)) for one in errors]
    return Covered(_mean(inside), _mean(alone), weighted(half, 0.5), weighted(wrong, 0.5))


def _mean(values: Sequence[tuple[str, float]]) -> float:
    """Over machines, of each one's mean."""
    found: Machines = {}
    for machine, value in values:
        found.setdefault(machine, []).append(value)
    return float(np.mean([np.mean(each) for each in found.values()]))


def _fitted(predictions: Sequence[Prediction]) -> dict[Key, Machines]:
    cells: dict[Key, Machines] = {}
    for one in predictions:
        table = one.bench.table
        for times in (one.fitted_us, one.few_nodes_us):
            if times is None:
                continue
            for row, value in zip(table.rows, (one.bench.measured_us / times).tolist(), strict=True):
                key = ("fitted", one.fabric, one.nodes, REGIMES[regime(row.size_bytes)])
                cells.setdefault(key, {}).setdefault(table.machine, []).append(value)
    return cells


def _left_out(predictions: Sequence[Prediction]) -> list[Error]:
    found: list[Error] = []
    for one in predictions:
        if one.left_out_us is None:
            continue
        table = one.bench.table
        values = np.log(one.bench.measured_us / one.left_out_us).tolist()
        found += [
            Error(table.machine, one.fabric, REGIMES[regime(row.size_bytes)], value)
            for row, value in zip(table.rows, values, strict=True)
        ]
    return found


def _weighted(machines: Machines) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All values in order, and the share of the weight that each has, every machine with the same."""
    values = np.concatenate([np.array(each) for each in machines.values()])
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in machines.values()])
    order = np.argsort(values)
    return values[order], weights[order] / weights.sum()


def _narrowest(machines: Machines) -> tuple[float, float]:
    """The ends of the narrowest interval around 1 with so much of the weight: errors lie on one side of the truth more
    often than on the other, and their tail is long, which percentiles on both sides would make it as wide as."""
    values, weights = _weighted(machines)
    below = np.concatenate(([0.0], np.cumsum(weights)))

    def ends() -> Iterator[tuple[float, float]]:
        for first in range(len(values)):
            last = int(np.searchsorted(below, below[first] + _HELD_FITTED - 1e-9))
            if last <= len(values):
                yield min(float(values[first]), 1.0), max(float(values[last - 1]), 1.0)

    return min(ends(), key=lambda pair: pair[1] - pair[0])
