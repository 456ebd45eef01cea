"""How wrong predictions are, as `distsim.collectives.uncertainty` reads it: `errors.csv`, made by `python -m
distsim.calibration.refit`, and how well the intervals made of it hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.predictions.left_out import Prediction
from distsim.calibration.tables import REGIMES, regime
from distsim.collectives.uncertainty import around

__all__ = ["covered", "errors_csv"]

_ANY = "any"
_FIELDS = ("origin", "fabric", "nodes", "size", "low", "high", "rows", "machines", "presets")
_LEAST_ROWS = 8
Key = tuple[str, str, str, str]


def errors_csv(predictions: Sequence[Prediction]) -> str:
    """The text of errors.csv: percentiles of measured / predicted, every machine with the same weight."""
    cells: dict[Key, dict[str, list[float]]] = {}
    presets: dict[Key, set[str]] = {}
    for one in predictions:
        table = one.bench.table
        for origin, whose, times in (
            ("fitted", one.fabric, one.fitted_us),
            ("fitted", one.fabric, one.few_nodes_us),
            ("left out", one.fabric, one.left_out_us),
            ("left out", _ANY, one.left_out_us),
        ):
            if times is None:
                continue
            for row, value in zip(table.rows, (one.bench.measured_us / times).tolist(), strict=True):
                key = (origin, whose, one.nodes, REGIMES[regime(row.size_bytes)])
                cells.setdefault(key, {}).setdefault(table.machine, []).append(value)
                presets.setdefault(key, set()).add(table.on.partition(":")[0])
    lines = [
        "# measured / predicted time: 10th and 90th percentile, every machine with the same weight. left out:",
        "# predicted with constants that saw nothing of the machine; fitted: with all tables, and with those of one",
        "# and two nodes. Made by `python -m distsim.calibration.refit`; rows and machines say of how many.",
        ",".join(_FIELDS),
    ]
    for key, machines in sorted(cells.items()):
        origin, fabric, nodes, size = key
        rows = sum(len(values) for values in machines.values())
        if rows < _LEAST_ROWS or (origin != "fitted" and fabric != _ANY and len(machines) < 2):
            continue
        low, high = _percentiles(machines)
        whose = " ".join(sorted(presets[key])) if origin == "fitted" else ""
        lines.append(f"{origin},{fabric},{nodes},{size},{low:.3f},{high:.3f},{rows},{len(machines)},{whose}")
    return "\n".join(lines) + "\n"


def covered(predictions: Sequence[Prediction]) -> tuple[float, float, float] | None:
    """Of machines that were left out, with every machine the same weight: the share of measured points that lie in the
    interval that a cluster nobody fitted gets, the median half-width of the intervals, and the median error."""
    inside: dict[str, list[float]] = {}
    widths: dict[str, list[float]] = {}
    wrong: dict[str, list[float]] = {}
    for one in predictions:
        if one.left_out_us is None:
            continue
        table = one.bench.table
        for row, time_us in zip(table.rows, one.left_out_us.tolist(), strict=True):
            found = around("", one.fabric, one.nodes, REGIMES[regime(row.size_bytes)], time_us)
            if found is not None:
                inside.setdefault(table.machine, []).append(float(found.low_s <= row.time_us <= found.high_s))
                widths.setdefault(table.machine, []).append((found.high_s - found.low_s) / 2 / time_us)
                wrong.setdefault(table.machine, []).append(abs(time_us / row.time_us - 1.0))
    if not inside:
        return None
    share = float(np.mean([np.mean(each) for each in inside.values()]))
    return share, _percentile(widths, 0.5), _percentile(wrong, 0.5)


def _weighted(machines: dict[str, list[float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All values in order, and which share of the weight lies below each, every machine with the same."""
    values = np.concatenate([np.array(each) for each in machines.values()])
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in machines.values()])
    order = np.argsort(values)
    return values[order], (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()


def _percentile(machines: dict[str, list[float]], share: float) -> float:
    values, below = _weighted(machines)
    return float(np.interp(share, below, values))


def _percentiles(machines: dict[str, list[float]]) -> tuple[float, float]:
    return min(_percentile(machines, 0.1), 1.0), max(_percentile(machines, 0.9), 1.0)
