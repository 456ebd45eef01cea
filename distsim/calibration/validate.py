"""`distsim validate`: predictions against measurements, table by table or (`--training`) training step by step."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from distsim.errors import UsageError
from distsim.text.units import plural

_EXPECTATION_FAILED = 5


def add_parser(subparsers: Any) -> None:
    """Declare `distsim validate`."""
    parser = subparsers.add_parser(
        "validate",
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
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="the same as --pool processes:N")
    parser.add_argument("--pool", metavar="ENGINE", help="--training: where the rows run, as for distsim tune")
    parser.set_defaults(func=run, usual_workers=os.cpu_count() or 1, ship=False)


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and return 0, or 5 if an error bound is exceeded."""
    if args.training:
        if args.rows or args.torch_estimator:
            raise UsageError("--rows and --torch-estimator are for collectives: they do not go with --training")
        sys.path.insert(0, str(clone(Path(__file__).resolve().parents[2])))
        return int(importlib.import_module("tools.fitting.training_steps").run(args))
    if args.pool is not None or args.workers is not None:
        raise UsageError("--pool and -n: expected --training, which runs programs")
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


def clone(root: Path) -> Path:
    """Return *root*, or else the working directory, if it is a clone of distsim, which has the training programs and
    the tool that compares their steps.

    Raises:
        UsageError: Neither is one.
    """
    for folder in (root, Path.cwd()):
        if (folder / "tools" / "fitting" / "training_steps.py").is_file():
            return folder
    raise UsageError(
        "validate --training runs the programs of scenarios/training, which are in the repository and not in an "
        "installed distsim: run it in the top folder of a clone"
    )


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
    from distsim.calibration.predictions import split

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
    for name, peer in peers.items():
        ratio = peer["median"] / peer["ours"] if peer["ours"] else float("inf")
        print(
            f"{_PEERS[name]}, on the {peer['rows']} rows it knows: "
            f"median {peer['median']:.1%}, ours {peer['ours']:.1%}: {ratio:.1f} times as close"
        )
    for text in summary.broken:
        print(f"BROKEN  {text}")
    print("all bounds hold" if not summary.broken else f"{plural(len(summary.broken), 'bound')} broken")


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
