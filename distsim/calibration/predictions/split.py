"""Errors of predictions by fabric, number of nodes and size, every machine with the same weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.predictions.left_out import Prediction
from distsim.calibration.tables import REGIMES
from distsim.collectives.uncertainty import NODE_CLASSES

__all__ = ["KINDS", "Cell", "split", "weighted_median", "worst_machines"]

KINDS = ("machine left out", "more nodes left out", "fitted")
"""How a table was predicted: by constants that saw none of its machine, none of more than two nodes, or all tables."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    kind: str
    fabric: str
    nodes: str
    machines: int
    tables: int
    median: tuple[float | None, ...]
    """Absolute error by regime of size; None where nothing was measured."""


def _times(one: Prediction, kind: str) -> NDArray[np.float64] | None:
    return {KINDS[0]: one.left_out_us, KINDS[1]: one.few_nodes_us, KINDS[2]: one.fitted_us}[kind]


def weighted_median(machines: dict[str, list[float]]) -> float:
    """The median of all values where each machine counts the same."""
    values = np.array([value for each in machines.values() for value in each])
    weights = np.array([1.0 / len(each) for each in machines.values() for _ in each])
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(weights.sum() / 2, reached, values[order]))


def _errors(predictions: Iterable[Prediction], kind: str, place: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in predictions:
        times = _times(one, kind)
        if times is not None:
            chosen = one.bench.regimes == place
            errors = np.abs(times / one.bench.measured_us - 1.0)[chosen].tolist()
            if errors:
                found.setdefault(one.bench.table.machine, []).extend(errors)
    return found


def _cell(kind: str, fabric: str, nodes: str, predictions: Sequence[Prediction]) -> Cell | None:
    some = [one for one in predictions if _times(one, kind) is not None]
    if not some:
        return None
    by_size = [_errors(some, kind, place) for place in range(len(REGIMES))]
    median = tuple(weighted_median(errors) if errors else None for errors in by_size)
    return Cell(kind, fabric, nodes, len({one.bench.table.machine for one in some}), len(some), median)


def split(predictions: Sequence[Prediction]) -> list[Cell]:
    """A line for all tables of each kind, then one for each fabric and class of nodes."""
    cells = [_cell(kind, "all", "all", predictions) for kind in KINDS]
    for fabric in sorted({one.fabric for one in predictions}):
        for nodes in NODE_CLASSES:
            some = [one for one in predictions if (one.fabric, one.nodes) == (fabric, nodes)]
            cells += [_cell(kind, fabric, nodes, some) for kind in KINDS]
    return [cell for cell in cells if cell is not None]


def worst_machines(predictions: Sequence[Prediction], kind: str, place: int) -> list[tuple[float, str]]:
    """Each machine's median error in one regime, the worst first."""
    errors = _errors(predictions, kind, place)
    return sorted(((float(np.median(each)), machine) for machine, each in errors.items()), reverse=True)
