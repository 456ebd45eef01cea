"""How sure a simulated time is: the 10th to the 90th percentile of the model's error in its regime.

A regime is a fabric, a class of sizes and a class of nodes, and whether the machine was fitted. The errors are in
`errors.csv`, made by `python -m distsim.calibration.refit`. For a preset with tables among the fitted they are those of
its fabric's tables as fitted, and with the tables of more than two nodes left out; for any other cluster those of
tables whose whole machine was left out. A fabric that fewer than two machines were measured with in that regime borrows
the errors of all fabrics, and the answer says so.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.constants import data_folder
from distsim.calibration.predictions.left_out import Prediction, node_class
from distsim.calibration.tables import REGIMES, regime
from distsim.cluster import Cluster

__all__ = ["Interval", "covered", "errors_csv", "interval"]

_ANY = "any"
_FIELDS = ("origin", "fabric", "nodes", "size", "low", "high", "rows", "machines", "presets")
_LEAST_ROWS = 8
Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a measured time lies in eight cases of ten."""

    low_s: float
    high_s: float
    origin: str
    """fitted: tables of this machine are among the fitted; left out: errors of machines that were not."""
    fabric: str
    """Whose errors these are: a fabric as NCCL names it, none inside a node, any where too few were measured."""
    nodes: str
    size: str

    @property
    def borrowed(self) -> bool:
        """The errors are those of other fabrics."""
        return self.fabric == _ANY


@dataclass(frozen=True, slots=True)
class _Spread:
    low: float
    high: float
    presets: tuple[str, ...]


@cache
def _spreads() -> dict[Key, _Spread]:
    path = data_folder() / "errors.csv"
    if not path.is_file():
        return {}
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {
        (row["origin"], row["fabric"], row["nodes"], row["size"]): _Spread(
            float(row["low"]), float(row["high"]), tuple(row["presets"].split())
        )
        for row in csv.DictReader(lines)
    }


def interval(cluster: Cluster, nbytes: int, num_nodes: int, time_s: float, flavour: str = "nccl") -> Interval | None:
    """The interval around *time_s*, simulated for a collective of *nbytes* (as in `Transfer`) over *num_nodes* nodes.
    None where nothing of the kind was measured: gloo, MPI and plain alpha-beta."""
    if flavour != "nccl" or cluster.nccl.version == "ideal" or not cluster.node.num_gpus:
        return None
    domain = max(1, cluster.node.nvlink_domain_nodes)
    inside = -(-num_nodes // domain) <= 1
    fabric, nodes = ("none", "1 node") if inside else (cluster.nccl.net, node_class(num_nodes))
    return _around(cluster.name, fabric, nodes, REGIMES[regime(nbytes)], time_s)


def _around(name: str, fabric: str, nodes: str, size: str, time_s: float) -> Interval | None:
    preset = name.partition(":")[0]
    for origin, whose in (("fitted", fabric), ("left out", fabric), ("left out", _ANY)):
        spread = _spreads().get((origin, whose, nodes, size))
        if spread is None or (origin == "fitted" and preset not in spread.presets):
            continue
        return Interval(time_s * spread.low, time_s * spread.high, origin, whose, nodes, size)
    return None


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
            found = _around("", one.fabric, one.nodes, REGIMES[regime(row.size_bytes)], time_us)
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
