"""How wrong predictions are, as `distsim.collectives.uncertainty` reads it: `errors.csv`, made by `python -m
distsim.calibration.refit`, and how well the intervals made of it hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.predictions.left_out import Prediction
from distsim.calibration.tables import REGIMES, regime
from distsim.collectives.uncertainty import ANY, BORROWED, KNOWN, around, widening

__all__ = ["Covered", "covered", "errors_csv"]

_FIELDS = ("origin", "fabric", "nodes", "size", "low", "high", "rows", "machines", "presets")
_LEAST_ROWS = 8
_LEAST_MACHINES = {KNOWN: 2, BORROWED: 2, ANY: 1}
"""That have been left out, for their errors to stand for others'; of one fabric three."""
_FABRICS_LEAST = 3
_HELD = 0.83
"""Of the errors seen; a little more than eight of ten, since the next machine is none of those."""
Machines = dict[str, list[float]]
"""Values by machine, each of which counts the same."""
Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Covered:
    """How well intervals hold, every machine with the same weight."""

    share: float
    """Of the measured points that lie in the interval that a cluster nobody fitted gets."""
    alone: float
    """The same with intervals that saw none of the machine's own errors."""
    half_width: float
    """Median, of the predicted time."""
    error: float
    """Median of |predicted / measured - 1|."""


def errors_csv(predictions: Sequence[Prediction]) -> str:
    """The text of errors.csv: the narrowest intervals of measured / predicted that hold eight of ten."""
    cells = _fitted(predictions) | _left_out(predictions)
    owners: dict[str, set[str]] = {}
    presets: dict[Key, set[str]] = {}
    for one in predictions:
        table = one.bench.table
        preset = one.bench.compiler.cluster.name.partition(":")[0]
        owners.setdefault(preset, set()).add(table.machine)
        for row in table.rows:
            presets.setdefault(("fitted", one.fabric, one.nodes, REGIMES[regime(row.size_bytes)]), set()).add(preset)
    lines = [
        "# measured / predicted time: the narrowest interval that holds eight of ten, every machine with the same",
        "# weight. left out: predicted with constants that saw nothing of the machine; fitted: with all tables, and",
        "# with those of one and two nodes, for presets that are one machine. measured elsewhere, not measured: all",
        "# fabrics that other machines have, that none has. Made by `python -m distsim.calibration.refit`.",
        ",".join(_FIELDS),
    ]
    for key, machines in sorted(cells.items()):
        origin, fabric, nodes, size = key
        rows = sum(len(values) for values in machines.values())
        if origin == "fitted" and rows < _LEAST_ROWS:
            continue
        if origin != "fitted" and not _enough(fabric, machines):
            continue
        low, high = _narrowest(machines)
        # A preset that stands for machines of several owners does for yet another's: that one was not fitted.
        whose = " ".join(sorted(one for one in presets.get(key, ()) if len(owners[one]) == 1))
        lines.append(f"{origin},{fabric},{nodes},{size},{low:.3f},{high:.3f},{rows},{len(machines)},{whose}")
    return "\n".join(lines) + "\n"


def covered(predictions: Sequence[Prediction]) -> Covered | None:
    """The intervals of machines that were left out; None where there is none."""
    inside: Machines = {}
    alone: Machines = {}
    widths: Machines = {}
    wrong: Machines = {}
    without: dict[str, dict[Key, Machines]] = {}
    for one in predictions:
        if one.left_out_us is None:
            continue
        machine = one.bench.table.machine
        if machine not in without:
            without[machine] = _left_out([other for other in predictions if other.bench.table.machine != machine])
        known = _known(one, predictions)
        for row, time_us in zip(one.bench.table.rows, one.left_out_us.tolist(), strict=True):
            size = REGIMES[regime(row.size_bytes)]
            found = around("", one.fabric, one.nodes, size, time_us, known)
            if found is None:
                continue
            inside.setdefault(machine, []).append(float(found.low_s <= row.time_us <= found.high_s))
            widths.setdefault(machine, []).append((found.high_s - found.low_s) / 2 / time_us)
            wrong.setdefault(machine, []).append(abs(time_us / row.time_us - 1.0))
            for whose in widening(one.fabric, known):
                cell = without[machine].get(("left out", whose, one.nodes, size))
                if cell is not None and _enough(whose, cell):
                    low, high = _narrowest(cell)
                    alone.setdefault(machine, []).append(float(low <= row.time_us / time_us <= high))
                    break
    if not inside:
        return None
    share, other = (float(np.mean([np.mean(each) for each in which.values()])) for which in (inside, alone or inside))
    return Covered(share, other, _median(widths), _median(wrong))


def _known(one: Prediction, predictions: Sequence[Prediction]) -> bool:
    """Whether another machine has the fabric; the links inside a node are everybody's."""
    machine = one.bench.table.machine
    return one.fabric == "none" or any(
        other.fabric == one.fabric and other.bench.table.machine != machine for other in predictions
    )


def _enough(fabric: str, machines: Machines) -> bool:
    least = _LEAST_MACHINES.get(fabric, _FABRICS_LEAST)
    return len(machines) >= least and sum(len(values) for values in machines.values()) >= _LEAST_ROWS


def _fitted(predictions: Sequence[Prediction]) -> dict[Key, Machines]:
    cells: dict[Key, Machines] = {}
    for one in predictions:
        for times in (one.fitted_us, one.few_nodes_us):
            if times is not None:
                _add(cells, one, "fitted", one.fabric, times)
    return cells


def _left_out(predictions: Sequence[Prediction]) -> dict[Key, Machines]:
    cells: dict[Key, Machines] = {}
    for one in predictions:
        if one.left_out_us is not None:
            for whose in widening(one.fabric, _known(one, predictions)):
                _add(cells, one, "left out", whose, one.left_out_us)
    return cells


def _add(cells: dict[Key, Machines], one: Prediction, origin: str, whose: str, times: NDArray[np.float64]) -> None:
    table = one.bench.table
    for row, value in zip(table.rows, (one.bench.measured_us / times).tolist(), strict=True):
        key = (origin, whose, one.nodes, REGIMES[regime(row.size_bytes)])
        cells.setdefault(key, {}).setdefault(table.machine, []).append(value)


def _weighted(machines: Machines) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All values in order, and the share of the weight that each has, every machine with the same."""
    values = np.concatenate([np.array(each) for each in machines.values()])
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in machines.values()])
    order = np.argsort(values)
    return values[order], weights[order] / weights.sum()


def _median(machines: Machines) -> float:
    values, weights = _weighted(machines)
    return float(np.interp(0.5, np.cumsum(weights) - weights / 2, values))


def _narrowest(machines: Machines) -> tuple[float, float]:
    """The ends of the narrowest interval around 1 with so much of the weight: errors lie on one side of the truth more
    often than on the other, and their tail is long, which percentiles on both sides would make it as wide as."""
    values, weights = _weighted(machines)
    below = np.concatenate(([0.0], np.cumsum(weights)))

    def ends() -> Iterator[tuple[float, float]]:
        for first in range(len(values)):
            last = int(np.searchsorted(below, below[first] + _HELD - 1e-9))
            if last <= len(values):
                yield min(float(values[first]), 1.0), max(float(values[last - 1]), 1.0)

    return min(ends(), key=lambda pair: pair[1] - pair[0])
