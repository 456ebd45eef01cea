"""`distsim validate`: predictions against measurements, table by table or (`--training`) training step by step."""

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

__all__ = ["add_parser", "run", "run_training"]

_EXPECTATION_FAILED = 5


def add_parser(subparsers: Any) -> None:
    """Declare `distsim validate`."""
    parser = subparsers.add_parser(
        "validate",
        help="compare the network model with measurements",
        description="Predict every measured nccl-tests table with constants that were fitted without its machine, "
        "and with constants of one and two nodes; print the error in time by size, fabric and number of nodes. "
        "--training predicts every published training step. The exit code is 5 if an error exceeds its bound.",
    )
    parser.add_argument(
        "--from",
        dest="folder",
        metavar="DIR",
        default=None,
        help="tables of your own, with an _index.csv (--training: a rows.csv; default: those that come with distsim)",
    )
    parser.add_argument(
        "--training", action="store_true", help="training steps (scenarios/training) instead of collectives"
    )
    parser.add_argument("--table", metavar="TEXT", default="", help="only tables (--training: rows) named with TEXT")
    parser.add_argument("--rows", action="store_true", help="print every row: size, measured, simulated, error")
    parser.add_argument(
        "--torch-estimator", action="store_true", help="also show the errors of torch's estimator and of NCCL's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and return 0, or 5 if an error bound is exceeded."""
    if args.training:
        if args.rows or args.torch_estimator:
            raise UsageError("--rows and --torch-estimator are for collectives: they do not go with --training")
        return run_training(args)
    from distsim.calibration.compare import read_tables
    from distsim.calibration.predictions import predicted, summarise

    tables = read_tables(Path(args.folder) if args.folder else None)
    chosen = [table for table in tables if args.table in table.name]
    if not chosen:
        raise UsageError(f"no table's name contains {args.table!r}: the tables are in _index.csv")
    predictions = predicted(chosen)
    summary = summarise(predictions)
    peers = _peers(summary) if args.torch_estimator else {}
    if args.json:
        print(json.dumps(_document(summary, predictions, args.rows) | peers))
    else:
        _print(summary, predictions, peers, args.rows)
    return _EXPECTATION_FAILED if summary.broken else 0


_PEERS = {
    "torch": "torch's estimator (torch/_inductor/comm_analysis.py)",
    "nccl": "NCCL's own (src/graph/tuning.cc, what ncclGroupSimulateEnd returns)",
}


def _peers(summary: Any) -> dict[str, dict[str, Any]]:
    """Return the errors of other cost models on the tables that each knows, and ours on the same."""
    import numpy as np

    from distsim.calibration.predictions import nccl_times_us, torch_times_us

    result: dict[str, dict[str, Any]] = {}
    for name, times_of in (("torch", torch_times_us), ("nccl", nccl_times_us)):
        each: dict[str, float] = {}
        ours: list[float] = []
        others: list[float] = []
        for errors in summary.tables:
            times = times_of(errors.bench)
            if times is None:
                continue
            error = np.abs(times / errors.bench.measured_us - 1.0)
            each[errors.bench.table.name] = float(np.median(error))
            others.extend(error.tolist())
            ours.extend(np.abs(errors.relative).tolist())
        median, own = (float(np.median(values)) if values else 0.0 for values in (others, ours))
        result[name] = {"tables": each, "median": median, "ours": own, "rows": len(others)}
    return result


def _print(summary: Any, predictions: list[Any], peers: dict[str, dict[str, Any]], rows: bool) -> None:
    import numpy as np

    from distsim.calibration.compare import REGIMES
    from distsim.calibration.predictions import covered, split

    print("Time, simulated against measured: median absolute error (and median signed error) by size.")
    print(
        "use: left = predicted with constants that saw no table of its machine, fit = all tables are among the fitted."
    )
    print(
        f"{'table':50s}{'use':6s}"
        + "".join(f"{name:>19s}" for name in REGIMES)
        + "".join(f"{name:>7s}" for name in peers)
    )
    for errors in summary.tables:
        table = errors.bench.table
        line = f"{table.name[:49]:50s}{errors.use:6s}"
        for i in range(3):
            some = errors.of(i)
            if not len(some):
                line += f"{'-':>19s}"
                continue
            text = f"{np.median(np.abs(some)):.1%} ({np.median(some):+.1%})"
            line += f"{text:>19s}"
        for peer in peers.values():
            peer_error = peer["tables"].get(table.name)
            line += f"{peer_error:7.1%}" if peer_error is not None else f"{'-':>7s}"
        print(line)
        if rows:
            for row, simulated in zip(table.rows, errors.simulated_us.tolist(), strict=True):
                error = simulated / row.time_us - 1.0
                print(f"    {row.size_bytes:>14d} B{row.time_us:>14.1f} us{simulated:>14.1f} us{error:>+10.1%}")
    print()
    print("Median absolute error, every machine with the same weight. fabric none: inside a node or an NVLink domain.")
    print(
        f"{'constants':22s}{'fabric':11s}{'nodes':13s}{'machines':>9s}{'tables':>8s}"
        + "".join(f"{n:>17s}" for n in REGIMES)
    )
    for cell in split(predictions):
        figures = "".join(f"{'-':>17s}" if one is None else f"{one:>17.1%}" for one in cell.median)
        print(f"{cell.kind:22s}{cell.fabric:11s}{cell.nodes:13s}{cell.machines:>9d}{cell.tables:>8d}{figures}")
    held = covered(predictions)
    if held:
        print(
            f"{held.share:.0%} of the points of machines that the fit left out lie in the interval ({held.alone:.0%} "
            f"if the interval used no errors of the machine); the median half-width is {held.half_width:.0%}, the "
            f"median error {held.error:.0%}"
        )
    for name, peer in peers.items():
        ratio = peer["median"] / peer["ours"] if peer["ours"] else float("inf")
        print(
            f"{_PEERS[name]}, on the {peer['rows']} rows it knows: "
            f"median {peer['median']:.1%}, ours {peer['ours']:.1%}: {ratio:.1f} times as close"
        )
    for text in summary.broken:
        print(f"BROKEN  {text}")
    print("all bounds hold" if not summary.broken else f"{len(summary.broken)} bounds broken")


def _document(summary: Any, predictions: list[Any], rows: bool) -> dict[str, Any]:
    from dataclasses import asdict

    import numpy as np

    from distsim.calibration.compare import REGIMES
    from distsim.calibration.predictions import split

    tables = []
    for errors in summary.tables:
        table = errors.bench.table
        entry: dict[str, Any] = {"name": table.name, "op": table.op, "on": table.on, "use": errors.use}
        entry["regimes"] = {
            name: {
                "median": float(np.median(np.abs(errors.of(i)))),
                "signed": float(np.median(errors.of(i))),
                "p90": float(np.percentile(np.abs(errors.of(i)), 90)),
                "rows": len(errors.of(i)),
            }
            for i, name in enumerate(REGIMES)
            if len(errors.of(i))
        }
        if rows:
            entry["rows"] = [
                {"size_bytes": row.size_bytes, "measured_us": row.time_us, "simulated_us": simulated}
                for row, simulated in zip(table.rows, errors.simulated_us.tolist(), strict=True)
            ]
        tables.append(entry)
    regimes = {
        name: {"median": summary.median[i], "p90": summary.p90[i], "rows": summary.rows[i]}
        for i, name in enumerate(REGIMES)
    }
    return {
        "schema": "distsim.validation/1",
        "tables": tables,
        "regimes": regimes,
        "broken": summary.broken,
        "split": [asdict(cell) for cell in split(predictions)],
    }


_FIGURES = "  step, s simulated   error    GiB simul.   error  wall"
"""The columns after the name: published and simulated step, published and simulated memory, and the time that the
simulation took."""


def run_training(args: argparse.Namespace) -> int:
    """Simulate and compare, with one row in parallel on each core. Return 0, or 5 if an error bound is exceeded."""
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
            elif not live:
                print(f"{len(runs)}/{len(rows)} {line_of(runs[-1], width)}", file=sys.stderr, flush=True)
    summary = summarise(runs)
    if args.json:
        print(json.dumps(_step_document(summary)))
    else:
        print()
        print_summary(summary, time.perf_counter() - began)
    return _EXPECTATION_FAILED if summary.broken else 0


def line_of(run: SimulatedRow, width: int) -> str:
    """Return a row of the table, *width* columns for its name and the rest for its figures."""
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
            f"{summary.held.share:.0%} of {summary.held.rows} rows of {summary.held.sources} sources lie in an "
            f"interval that was made without their source; the median half-width is {summary.held.half_width:.1%}"
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


def _step_document(summary: StepSummary) -> dict[str, Any]:
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
