"""`python -m distsim.calibration.refit`: the constants fitted anew to the tables, and what leaving tables out does.

Writes three data files beside this one: `nccl.toml` (the constants), `left_out.toml` (the constants that each machine's
tables are predicted with: fitted without them; and those fitted to one and two nodes only) and `errors.csv` (how wrong
predictions of that kind are, by fabric, size and nodes: what `interval` answers with). `--errors` keeps the constants.
"""

from __future__ import annotations

import argparse
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from distsim.calibration.compare import Bench
from distsim.calibration.constants import data_folder, read_constants
from distsim.calibration.datafile import data_file
from distsim.calibration.fit import Fitted, fit, fitted_names
from distsim.calibration.predictions.errors import errors_csv
from distsim.calibration.predictions.left_out import FEW_NODES, predicted
from distsim.calibration.tables import Table, read_tables

__all__ = ["main"]


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    data = tomllib.loads(path.read_text("utf-8"))
    return {
        f"{table}.{key}": entry
        for table, entries in data.items()
        for key, entry in entries.items()
        if isinstance(entry, dict)
    }


def _is_of(machine: str, table: Table) -> bool:
    return table.machine == machine


def _left_out(fitted: Fitted, tables: list[Table]) -> str:
    """The text of left_out.toml."""
    lines = [
        "# Constants fitted without one machine's tables, and without the tables of more than two nodes: only those",
        "# that differ by more than 0.5 %. Made by `python -m distsim.calibration.refit`.",
    ]
    machines = dict.fromkeys(table.machine for table in tables)
    cases = {machine: fitted.without(partial(_is_of, machine)) for machine in machines}
    cases[FEW_NODES] = fitted.without(lambda table: table.nnodes > 2)
    for name, values in cases.items():
        lines += ["", f'["{name}"]']
        for key, value in values.items():
            if abs(value / fitted.constants.values[key] - 1.0) > 5e-3:
                lines.append(f'"{key}" = {value:.4g}')
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Refit and write."""
    parser = argparse.ArgumentParser(prog="python -m distsim.calibration.refit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--errors", action="store_true", help="only errors.csv, from the constants that are there")
    args = parser.parse_args(argv)
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
