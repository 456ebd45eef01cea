"""The constants of the network model, fitted anew to the measured tables.

    python -m tests.benchmarks.fit [--rounds N] [--errors]

Peer: none. Aim: none here; `distsim validate` holds the errors that result to their bounds.

Writes three data files of distsim/calibration: `nccl.toml` (the constants), `left_out.toml` (the constants that each
machine's tables are predicted with: fitted without them; and those fitted to one and two nodes only) and `errors.csv`
(how wrong predictions of that kind are, by fabric, size and nodes: what an interval is made of). --errors keeps the
constants.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import REGIMES, Bench, MeasuredTable, read_tables, regime
from distsim.calibration.constants import data_folder, read_constants
from distsim.calibration.fit import HUBER, FitEnd, Fitted, data_file, fit, fitted_names
from distsim.calibration.predictions import (
    FEW_NODES,
    HELD,
    Error,
    Prediction,
    Widths,
    left_out_errors,
    predicted,
    ratios,
    weighted,
)
from distsim.collectives.uncertainty import NODE_CLASSES, OTHERS
from tests.benchmarks.arguments import Arguments, count

__all__ = ["errors_csv", "main", "narrowest", "without"]

_FIELDS = ("origin", "fabric", "nodes", "size", "low", "high", "rows", "machines", "presets")
_LEAST_ROWS = 8
_HELD_FITTED = 0.83
"""Of a fitted machine's own; a little more than eight of ten, since the next run is none of those."""
Machines = dict[str, list[float]]
"""Values by machine, each of which counts the same."""
Key = tuple[str, str, str, str]


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    data = tomllib.loads(path.read_text("utf-8"))
    return {
        f"{table}.{key}": entry
        for table, entries in data.items()
        for key, entry in entries.items()
        if isinstance(entry, dict)
    }


def _is_of(machine: str, table: MeasuredTable) -> bool:
    return table.machine == machine


def without(end: FitEnd, left_out: Callable[[MeasuredTable], bool]) -> dict[str, float]:
    """What the constants would be had the tables that *left_out* names not been there: the same fit, with the errors
    as linear in the logarithms of the constants as they are where it ended."""
    kept = np.concatenate([np.full(len(table.rows), not left_out(table)) for table in end.tables])
    slope, error, weight = end.slope[kept], end.error[kept], end.weight[kept]
    moved = np.zeros(len(end.names))
    for _ in range(20):
        now = error + slope @ moved
        robust = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-12))
        normal = slope.T @ (robust[:, None] * slope) + end.hold.T @ end.hold
        pull = slope.T @ (robust * error) + end.hold.T @ (end.hold @ end.values - end.held)
        moved = np.clip(-np.linalg.solve(normal + 1e-9 * np.eye(len(moved)), pull), -3.0, 3.0)
    return dict(zip(end.names, np.exp(end.values + moved).tolist(), strict=True))


def _left_out(fitted: Fitted, tables: list[MeasuredTable]) -> str:
    """The text of left_out.toml."""
    lines = [
        "# Constants fitted without one machine's tables, and without the tables of more than two nodes: only those",
        "# that differ by more than 0.5 %. Made by `python -m tests.benchmarks.fit`.",
    ]
    machines = dict.fromkeys(table.machine for table in tables)
    cases = {machine: without(fitted.end, partial(_is_of, machine)) for machine in machines}
    cases[FEW_NODES] = without(fitted.end, lambda table: table.nnodes > 2)
    for name, values in cases.items():
        lines += ["", f'["{name}"]']
        for key, value in values.items():
            if abs(value / fitted.constants.values[key] - 1.0) > 5e-3:
                lines.append(f'"{key}" = {value:.4g}')
    return "\n".join(lines) + "\n"


def errors_csv(predictions: Sequence[Prediction]) -> str:
    """The text of errors.csv: intervals of measured / predicted that hold eight of ten."""
    lines = [
        "# measured / predicted time: an interval that holds eight of ten, every machine with the same weight.",
        "# fitted: the narrowest around errors with all tables, and with those of one and two nodes, for presets that",
        "# are one machine. left out: about predictions with constants that saw nothing of the machine, as wide as",
        "# needed where the interval saw nothing of it either (predictions/widths.py). rows, machines: of the fabric",
        "# in that size. others: all fabrics but InfiniBand. Made by",
        "# `python -m tests.benchmarks.fit`.",
        ",".join(_FIELDS),
        *_fitted_lines(predictions),
        *_left_out_lines(left_out_errors(predictions)),
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
        low, high = narrowest(machines)
        # A preset that stands for machines of several owners does for yet another's: that one was not fitted.
        whose = " ".join(sorted(one for one in presets.get(key, ()) if len(owners[one]) == 1))
        yield f"{','.join(key)},{low:.3f},{high:.3f},{rows},{len(machines)},{whose}"


def _left_out_lines(errors: Sequence[Error]) -> Iterator[str]:
    if not errors:
        return
    widths, reach = Widths(errors), weighted(ratios(errors), HELD)
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


def _weighted(machines: Machines) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All values in order, and the share of the weight that each has, every machine with the same."""
    values = np.concatenate([np.array(each) for each in machines.values()])
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in machines.values()])
    order = np.argsort(values)
    return values[order], weights[order] / weights.sum()


def narrowest(machines: Machines) -> tuple[float, float]:
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


def main() -> None:
    """Fit and write."""
    parser = Arguments(__doc__)
    parser.add_argument("--rounds", type=count, default=8, help="of the fit (default 8)")
    parser.add_argument("--errors", action="store_true", help="only errors.csv, from the constants that are there")
    args = parser.parse_args()
    folder = data_folder()
    tables = read_tables()
    if not args.errors:
        path = folder / "nccl.toml"
        entries, start = _entries(path), read_constants(path)
        fixed = {name for name, entry in entries.items() if not str(entry["source"]).startswith("fitted")}
        priors = {name: float(entry["prior"]) for name, entry in entries.items() if "prior" in entry}
        benches = [Bench.of(table).thinned() for table in tables]
        names = fitted_names(benches, start, fixed)
        fitted = fit(
            benches, start, names, rounds=args.rounds, priors=priors, report=lambda line: print(line, flush=True)
        )
        path.write_text(data_file(path, fitted), "utf-8")
        (folder / "left_out.toml").write_text(_left_out(fitted, tables), "utf-8")
    (folder / "errors.csv").write_text(errors_csv(predicted(tables)), "utf-8")


if __name__ == "__main__":
    main()
