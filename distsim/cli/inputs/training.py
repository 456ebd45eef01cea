"""`distsim validate --training`: simulated training steps against published ones, row by row."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.calibration.training.steps import SimulatedRow, StepSummary

__all__ = ["run_training"]

_EXPECTATION_FAILED = 5
_FIGURES = "  step, s simulated   error    GiB simul.   error  wall"
"""The columns behind the name: published and simulated step, published and simulated memory, and our own time."""


def run_training(args: argparse.Namespace) -> int:
    """Simulate and compare, as many rows beside each other as there are cores; answers 0, or 5 where a bound is
    broken."""
    from distsim.calibration.training.steps import TABLES, programs_folder, read_rows, simulate, summarise
    from distsim.report.progress import is_shown

    rows = [row for row in read_rows(Path(args.folder) if args.folder else None) if args.table in row.name]
    if not rows:
        raise UsageError(f"no row's name contains {args.table!r}: the rows are in rows.csv")
    programs = programs_folder()
    live = is_shown(sys.stderr)
    width = max(80, min(120, shutil.get_terminal_size((100, 24)).columns)) - len(_FIGURES)
    rows.sort(key=lambda row: list(TABLES).index(row.table))
    runs: list[SimulatedRow] = []
    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as beside:
        coming = beside.map(lambda row: simulate(row, programs), rows)
        for row in rows:
            if not args.json and (not runs or runs[-1].row.table != row.table):
                print(f"{'' if not runs else chr(10)}{TABLES[row.table]}\n{'':{width}}{_FIGURES}", flush=True)
            if live:
                print(f"\r{len(runs) + 1}/{len(rows)} {row.name} ...\x1b[K", end="", file=sys.stderr, flush=True)
            runs.append(next(coming))
            if live:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            if not args.json:
                print(line_of(runs[-1], width), flush=True)
    summary = summarise(runs)
    if args.json:
        print(json.dumps(_document(summary)))
    else:
        print()
        print_summary(summary, time.perf_counter() - began)
    return _EXPECTATION_FAILED if summary.broken else 0


def line_of(run: SimulatedRow, width: int) -> str:
    """A row of the table, *width* columns for its name and the rest for its figures."""
    from distsim.text.untrusted_input import printable

    name = printable(run.row.name) + (" *" if run.micro_batches else "") + (" ?" if run.row.unseen else "")
    name = name if len(name) <= width else name[: width - 1] + "…"
    if run.step_s is None or run.step_error is None:
        return f"{name:{width}}{run.row.step_s:>9.4g}  did not run: {printable(run.failure)}"
    published = "-" if run.row.memory_gib is None else f"{run.row.memory_gib:.1f}"
    simulated = "-" if run.peak_memory_bytes is None else f"{run.peak_memory_bytes / 2**30:.1f}"
    error = "-" if run.memory_error is None else f"{run.memory_error:+.1%}"
    step = f"{run.row.step_s:>9.4g}{run.step_s:>10.4g}{run.step_error:>+8.1%}"
    return f"{name:{width}}{step}{published:>7s}{simulated:>7s}{error:>8s}{run.wall_s:>5.0f}s"


def print_summary(summary: StepSummary, seconds: float) -> None:
    """Print the medians beside their bounds, the broken bounds, and the elapsed time."""
    from distsim.calibration.training.steps import LARGEST, MEDIANS, MEMORY

    for regime, middle in summary.medians.items():
        if middle is not None:
            bound = f"(at most {MEDIANS[regime]:.0%})"
            print(f"{regime:>10s}: {len(summary.of(regime)):2d} rows, median error of the step {middle:.1%} {bound}")
    if summary.memory is not None:
        bound = f"(any at most {MEMORY:.0%}; any step at most {LARGEST:.0%})"
        print(f"{'memory':>10s}: median error {summary.memory:.1%} {bound}")
    if summary.unseen is not None:
        unseen = sum(run.row.unseen for run in summary.runs)
        print(
            f"? ({unseen} of them) were not looked at while the model was improved: median error {summary.unseen:.1%}"
        )
    if summary.held is not None:
        print(
            f"intervals of sources left out hold {summary.held.share:.0%} of {summary.held.rows} rows of "
            f"{summary.held.sources} sources; their median half-width is {summary.held.half_width:.1%}"
        )
    continued = sum(run.micro_batches is not None for run in summary.runs)
    if continued:
        print(
            f"* ({continued} of them) two steps of fewer micro-batches were simulated, and continued in a straight line"
        )
    took = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
    print(f"rows: {len(summary.runs)}, in {took}")
    for text in summary.broken:
        print(f"BROKEN  {text}")
    print("all bounds hold" if not summary.broken else f"{len(summary.broken)} bounds broken")


def _document(summary: StepSummary) -> dict[str, Any]:
    from dataclasses import asdict

    rows = []
    for run in summary.runs:
        row = run.row
        entry: dict[str, Any] = {"table": row.table, "name": row.name, "on": row.on, "program": row.program}
        entry |= {"flags": list(row.flags), "published_step_s": row.step_s, "published_memory_GiB": row.memory_gib}
        entry |= {"step_time_s": run.step_s, "peak_memory_bytes": run.peak_memory_bytes}
        entry |= {"tokens_per_s_per_gpu": run.tokens_per_s_per_gpu, "mfu": run.mfu, "wall_s": run.wall_s}
        entry |= {"regime": run.regime, "launching_share": run.launching_share, "source": row.source}
        entry |= {"micro_batches_simulated": run.micro_batches, "unseen": row.unseen}
        rows.append(entry | {"step_error": run.step_error, "memory_error": run.memory_error, "failure": run.failure})
    return {
        "schema": "distsim.training_validation/1",
        "rows": rows,
        "medians": summary.medians,
        "memory_median": summary.memory,
        "unseen_median": summary.unseen,
        "intervals": None if summary.held is None else asdict(summary.held),
        "broken": summary.broken,
    }
