"""The constants of the network model, fitted anew to the measured tables.

    python -m tools.fitting.fit [--rounds N] [--errors]
    python -m tools.fitting.fit --from DIR [--rounds N] [-o FILE | --leave-one-out]

Peer: none. Aim: none here; `distsim validate` holds the errors that result to their bounds.

Writes three data files: `nccl.toml` (the constants) and `errors.csv` (how wrong predictions are, by fabric, size and
nodes: what an interval is made of) in distsim/collectives/fitted, and `left_out.toml` (the constants that each
machine's tables are predicted with: fitted without them; and those fitted to one and two nodes only) in
distsim/calibration. --errors keeps the constants. In the end it prints how many points of machines that the fit left
out lie in their interval. --from fits the shipped constants to tables of your own instead, those with use = fit in
DIR/_index.csv, and writes nothing but FILE.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distsim.calibration.compare import REGIMES, Bench, MeasuredTable, data_folder, read_tables, regime
from distsim.calibration.predictions import FEW_NODES, Errors, Prediction, by_weight, predicted
from distsim.collectives.constants import Constants, fitted_folder, read_constants
from distsim.collectives.uncertainty import NODE_CLASSES, OTHERS
from distsim.errors import UsageError
from tools.benchmarks.arguments import Arguments, count
from tools.fitting.coverage import HELD, Error, Widths, covered, left_out_errors, ratios, weighted
from tools.fitting.least_squares import HUBER, FitEnd, Fitted, data_file, fit, fitted_names

__all__ = ["errors_csv", "left_out_toml", "main", "narrowest", "without"]

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
    moved = np.zeros(len(end.values))
    for _ in range(20):
        now = error + slope @ moved
        robust = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-12))
        normal = slope.T @ (robust[:, None] * slope) + end.hold.T @ end.hold
        pull = slope.T @ (robust * error) + end.hold.T @ (end.hold @ end.values - end.held)
        moved = np.clip(-np.linalg.solve(normal + 1e-9 * np.eye(len(moved)), pull), -3.0, 3.0)
    common = slice(len(end.names))
    return dict(zip(end.names, np.exp((end.values + moved)[common]).tolist(), strict=True))


def left_out_toml(fitted: Fitted, tables: list[MeasuredTable]) -> str:
    """The text of left_out.toml."""
    lines = [
        "# Constants fitted without one machine's tables, and without the tables of more than two nodes: only those",
        "# that differ by more than 0.5 %. Made by `python -m tools.fitting.fit`.",
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
        "# needed where the interval saw nothing of it either (tools/fitting/coverage.py). rows, machines: of the",
        "# fabric in that size. others: all fabrics but InfiniBand. Made by",
        "# `python -m tools.fitting.fit`.",
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
                some = [one for one in errors if one.size == size and _in_fabric(one, fabric)]
                if not some:
                    continue
                machines = len({one.machine for one in some})
                far = math.exp(reach * widths.of(fabric, size))
                yield f"left out,{fabric},{nodes},{size},{1 / far:.3f},{far:.3f},{len(some)},{machines},"


def _in_fabric(error: Error, fabric: str) -> bool:
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


def narrowest(machines: Machines) -> tuple[float, float]:
    """The ends of the narrowest interval around 1 with so much of the weight: errors lie on one side of the truth more
    often than on the other, and their tail is long, which percentiles on both sides would make it as wide as."""
    values, weights = by_weight(machines)
    below = np.concatenate(([0.0], np.cumsum(weights)))

    def ends() -> Iterator[tuple[float, float]]:
        for first in range(len(values)):
            last = int(np.searchsorted(below, below[first] + _HELD_FITTED - 1e-9))
            if last <= len(values):
                yield min(float(values[first]), 1.0), max(float(values[last - 1]), 1.0)

    return min(ends(), key=lambda pair: pair[1] - pair[0])


_MOST_ROWS = 48
_NOT_FITTED = ("launch.chunk_MiB", "p2p.channel_GBps")


def _thinned(table: MeasuredTable) -> MeasuredTable:
    """The table with at most about 48 rows: more sizes of one curve do not improve a fit."""
    return replace(table, rows=table.rows[:: max(1, len(table.rows) // _MOST_ROWS)])


def _fit_own(folder: Path, output: Path | None, rounds: int, leave_one_out: bool) -> None:
    """Fit the shipped constants to the tables of a folder."""
    path = fitted_folder() / "nccl.toml"
    start = read_constants(path)
    benches = [Bench.of(table) for table in read_tables(folder) if table.use == "fit"]
    if not benches:
        raise UsageError(f"no table of {folder} has use = fit in _index.csv")
    if leave_one_out:
        _leave_one_out(benches, start, rounds)
        return
    names = fitted_names(benches, start, _NOT_FITTED)
    fitted = fit(benches, start, names, rounds=rounds, report=lambda line: print(line, flush=True))
    for name in names:
        print(
            f"{name:28s}{start.values[name]:10.4g} -> {fitted.constants.values[name]:10.4g}  "
            f"(uncertainty {fitted.sigma[name]:.2f})"
        )
    text = data_file(path, fitted, f"fitted to {len(benches)} tables")
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, "utf-8")


def _leave_one_out(benches: Sequence[Bench], start: Constants, rounds: int) -> None:
    """Fit without each machine's tables in turn, and print how well those are then predicted."""
    every: list[list[float]] = [[], [], []]
    print("Each machine predicted by constants fitted to all the others: median absolute error by size.")
    print(f"{'machine':24s}{'tables':>7s}" + "".join(f"{name:>18s}" for name in REGIMES))
    for machine in dict.fromkeys(bench.table.on for bench in benches):
        others = [bench for bench in benches if bench.table.on != machine]
        own = [bench for bench in benches if bench.table.on == machine]
        fitted = fit(others, start, fitted_names(others, start, _NOT_FITTED), rounds=min(rounds, 4))
        line = f"{machine:24s}{len(own):>7d}"
        for bench in own:
            bench.use(fitted.constants)
        errors = [Errors(bench, bench.times_us()) for bench in own]
        for i in range(3):
            some = np.abs(np.concatenate([error.of(i) for error in errors]))
            every[i].extend(some.tolist())
            line += f"{np.median(some):>18.1%}" if len(some) else f"{'-':>18s}"
        print(line, flush=True)
    print(f"{'all rows':31s}" + "".join(f"{np.median(some):>18.1%}" for some in every))


def main() -> None:
    """Fit and write."""
    parser = Arguments(__doc__)
    parser.add_argument("--rounds", type=count, default=8, help="of the fit (default 8)")
    parser.add_argument("--errors", action="store_true", help="only errors.csv, from the constants that are there")
    parser.add_argument("--from", dest="folder", type=Path, metavar="DIR", help="tables of your own")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="with --from: where to write (default: print)"
    )
    parser.add_argument("--leave-one-out", action="store_true", help="with --from: only how each machine is predicted")
    args = parser.parse_args()
    if args.folder is not None:
        try:
            _fit_own(args.folder, args.output, args.rounds, args.leave_one_out)
        except UsageError as error:
            parser.error(str(error))
        return
    if args.output is not None or args.leave_one_out:
        parser.error("expected --from DIR with -o and --leave-one-out")
    tables = read_tables()
    if not args.errors:
        path = fitted_folder() / "nccl.toml"
        entries, start = _entries(path), read_constants(path)
        fixed = {name for name, entry in entries.items() if not str(entry["source"]).startswith("fitted")}
        priors = {name: float(entry["prior"]) for name, entry in entries.items() if "prior" in entry}
        benches = [Bench.of(_thinned(table)) for table in tables]
        names = fitted_names(benches, start, fixed)
        fitted = fit(
            benches, start, names, rounds=args.rounds, priors=priors, report=lambda line: print(line, flush=True)
        )
        path.write_text(data_file(path, fitted), "utf-8")
        for machine, factors in fitted.own.items():
            told = [f"{name} x {factor:.2f}" for name, factor in factors.items() if abs(math.log(factor)) > 0.05]
            print(f"{machine}: {chr(44).join(told) or chr(45)}", flush=True)
        (data_folder() / "left_out.toml").write_text(left_out_toml(fitted, tables), "utf-8")
    predictions = predicted(tables)
    (fitted_folder() / "errors.csv").write_text(errors_csv(predictions), "utf-8")
    if (known := covered(predictions)) is not None:
        print(
            f"{known.share:.0%} of the points of machines that the fit left out lie in the interval ({known.alone:.0%} "
            f"if the interval used no errors of the machine); the median half-width is {known.half_width:.0%}, the "
            f"median error {known.error:.0%}"
        )


if __name__ == "__main__":
    main()
