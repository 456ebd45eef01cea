"""`distsim calibrate`: a cluster file from logs of nccl-tests or a live gloo, a GPU's data file from its kernels."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.errors import UsageError
from distsim.text.output_files import check_writable, output_file, write_text, written
from distsim.text.units import plural, seconds
from distsim.text.untrusted_input import folded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from distsim.calibration.compare import Bench
    from distsim.calibration.logs.fit import FitToLogs
    from distsim.collectives.constants import Constants

_WIDE = 120


def run_logs(args: argparse.Namespace) -> int:
    """Read, check, fit, show and write; return 0. If the file goes to stdout, all other output goes to stderr."""
    from distsim.calibration.logs.fit import benches_of, bounds, fit_to_logs, spreads
    from distsim.calibration.logs.folder import agreed, fits, read_logs
    from distsim.calibration.logs.output import bars, cluster_file, sources_text, svg, table, worse
    from distsim.collectives.constants import nccl_constants

    say = partial(print, file=sys.stderr if args.output is None else sys.stdout)
    folder = Path(args.folder)
    logs = agreed(read_logs(folder))
    cluster, lent = fits(logs, args.like)
    for note in (*folded(list(logs.notes)), *lent):
        say(f"note: {note}")
    files = {run.file for run in logs.runs}
    say(f"{plural(len(logs.runs), 'run')} in {plural(len(files), 'log')}: {sources_text(logs)}")
    start = nccl_constants().changed({name: one.value for name, one in cluster.constants.items()})

    def limits(name: str) -> tuple[float, float]:
        return bounds(name, start, cluster)

    benches = benches_of(logs.runs, args.like, logs.version)
    fitted = fit_to_logs(benches, start, limits)
    before, after = _times(benches, fitted.before), _times(benches, fitted.after)
    lines = [*table(benches, before, after), "", *bars(benches, before, after), "", *_constants(fitted, args.like)]
    say("\nError in time, median of |simulated / measured - 1|, before -> after:")
    for line in [*lines, *_larger(benches, start, limits)]:
        say(line)
    for line in worse(benches, before, after, args.like):
        say(f"warning: the fit made this worse: {line}")
    name = Path(args.output).stem if args.output else f"{cluster.name.replace(':', '-')}-measured"
    if args.plot is not None:
        write(args.plot, svg(benches, before, after, f"{name}: {sources_text(logs)}"))
    errors = spreads(benches, fitted.after)
    write(args.output, cluster_file(logs, fitted, errors, cluster, args.like, name, folder.name or str(folder)))
    return 0


def _times(benches: Sequence[Bench], constants: Constants) -> list[NDArray[np.float64]]:
    result = []
    for bench in benches:
        bench.use(constants)
        result.append(bench.times_us())
    return result


def _constants(fitted: FitToLogs, like: str) -> Iterator[str]:
    """Print each constant before and after the fit, the constants that the logs do not determine, and those at a
    bound."""
    from distsim.calibration.logs.fit import value_of

    if not fitted.uncertainty:
        yield f"these logs determine no constant: every constant keeps the value of {like}"
    else:
        yield f"{'fitted':34s}{'before':>10s}{'after':>10s}{'uncertainty':>14s}"
    for name, sigma in sorted(fitted.uncertainty.items()):
        before, after = value_of(fitted.before, name), value_of(fitted.after, name)
        spread = f"{math.expm1(sigma):.0%}" if sigma < math.log(2) else f"times {math.exp(sigma):.1f}"
        stuck = " (at its bound)" if name in fitted.at_bound else ""
        yield f"{name:34s}{before:10.4g}{after:10.4g}{spread:>14s}{_meant(name)}{stuck}"
    if fitted.untold:
        yield f"cannot be determined from these logs, kept from {like}:"
    for name in sorted(fitted.untold):
        yield f"{name:34s}{value_of(fitted.before, name):10.4g}{'':24s}{_meant(name)}".rstrip()


def _meant(name: str) -> str:
    """Return the meaning of a constant if the terminal is wide enough."""
    from distsim.calibration.logs.fit import meaning

    return f"  {meaning(name)}" if shutil.get_terminal_size().columns >= _WIDE else ""


def _larger(benches: Sequence[Bench], start: Constants, limits: Callable[[str], tuple[float, float]]) -> Iterator[str]:
    """Print how well the largest number of nodes is predicted from the others, if there are at least two."""
    from distsim.calibration.compare import REGIMES
    from distsim.calibration.logs.fit import fit_to_logs

    counts = sorted({bench.table.nnodes for bench in benches})
    if len(counts) < 2:
        yield "the logs have one number of nodes only, so they do not show how well others are predicted"
        return
    largest = [bench for bench in benches if bench.table.nnodes == counts[-1]]
    fitted = fit_to_logs([bench for bench in benches if bench.table.nnodes < counts[-1]], start, limits)
    errors: list[list[float]] = [[], [], []]
    for bench, times in zip(largest, _times(largest, fitted.after), strict=True):
        for i, error in zip(bench.regimes, abs(times / bench.measured_us - 1), strict=True):
            errors[i].append(error)
    medians = [f"{name} {statistics.median(some):.0%}" for name, some in zip(REGIMES, errors, strict=True) if some]
    yield f"{counts[-1]} nodes, predicted from logs of fewer: median error {', '.join(medians)}"


def write(output: str | None, text: str) -> None:
    """Write *text* to the file *output*; without *output* print it."""
    if output is None:
        print(text, end="")
        return
    with written("-o", output):
        write_text(output, text)


def add_parser(subparsers: Any) -> None:
    """Declare `distsim calibrate`."""
    parser = subparsers.add_parser(
        "calibrate",
        description="--from LOGS reads what nccl-tests or rccl-tests printed (a folder, or one file) and writes a "
        "cluster file with the constants that the logs determine. --on gloo measures gloo between processes on this "
        "machine and writes a cluster file for it; --ops measures the kernels of this machine's GPU and writes its "
        "data file.",
        epilog="example: distsim calibrate --from logs/ --like dgx-h100 -o ours.toml --plot ours.svg, then "
        "distsim bench all_reduce --on ours.toml:8 -b 8 -e 8G -f 2",
    )
    parser.add_argument("--from", dest="folder", metavar="LOGS", default=None, help="logs of nccl-tests")
    parser.add_argument("--on", metavar="BACKEND", default=None, help="measure a live backend: gloo")
    parser.add_argument("--ops", action="store_true", help="measure this machine's GPU: needs CUDA")
    parser.add_argument(
        "--like",
        metavar="NAME",
        default=None,
        help="what lends all that is not measured: with --from the cluster (preset or file) that the logs' resembles, "
        "with --ops the GPU (default: by chip)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", default=None, help="where to write (default: print)")
    parser.add_argument(
        "--plot",
        metavar="FILE.svg",
        type=output_file("--plot", "fit.svg"),
        help="with --from: draw the times and both simulations",
    )
    parser.add_argument("--nproc-per-node", metavar="N", type=int, default=2, help="ranks of gloo (default 2)")
    parser.add_argument("--seconds", metavar="S", type=seconds, default=15.0, help="how long gloo is measured")
    parser.add_argument(
        "--check", action="store_true", help="also measure sizes between, and print how they are predicted"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Fit constants to logs or measure a GPU, and return 0."""
    if [args.folder is None, args.on is None, not args.ops].count(False) != 1:
        raise UsageError(
            "expected --from DIR (logs of nccl-tests), --on gloo (measure here) or --ops (measure a GPU), one of them"
        )
    logs = args.folder is not None
    if logs and (Path(args.folder) / "_index.csv").is_file():
        raise UsageError(
            f"{args.folder}: expected logs of nccl-tests, got tables with an _index.csv: distsim validate --from "
            f"{args.folder} compares them, and python -m tools.fitting.fit --from {args.folder}, in a clone of "
            "distsim, fits the model's constants to them"
        )
    if args.like is not None and not (args.ops or logs):
        raise UsageError("expected --like with --ops, or with --from LOGS")
    if args.plot is not None and not logs:
        raise UsageError("expected --plot with --from LOGS")
    if args.plot is not None and not args.plot.endswith(".svg"):
        raise UsageError(f"--plot {args.plot}: expected a file ending in .svg")
    check_writable(args.output, "-o", "gpu.toml" if args.ops else "cluster.toml")
    if args.ops:
        return _ops(args)
    if logs:
        return run_logs(args)
    if args.on in ("nccl", "mpi"):
        raise UsageError(
            f"calibrate --on {args.on} is not available: run nccl-tests on it, save its output in a folder and use "
            "--from FOLDER --like CLUSTER"
        )
    if args.on != "gloo":
        raise UsageError(f"expected --on gloo, got {args.on!r}")
    return _live(args)


def _ops(args: argparse.Namespace) -> int:
    import torch

    from distsim.calibration.ops import calibrate_ops, chip_facts, cuda_clock, gpu_toml, same_chip
    from distsim.kernels.gpu_file import gpu_names, read_gpu

    if not torch.cuda.is_available():
        raise UsageError(
            "calibrate --ops: expected a GPU that torch can use, found none: run it where the GPU is, or name one of "
            f"{', '.join(gpu_names())} in the cluster file"
        )
    base = args.like or same_chip(torch)
    spec, facts = chip_facts(torch, read_gpu(base))
    spec, constants = calibrate_ops(spec, cuda_clock(torch))
    write(args.output, gpu_toml(base, spec, facts, constants))
    return 0


def _live(args: argparse.Namespace) -> int:
    from distsim.calibration.live import cluster_toml, fit_gloo, measure_gloo

    if args.nproc_per_node < 2:
        raise UsageError(f"expected at least 2 ranks, got --nproc-per-node {args.nproc_per_node}")
    fours = [4**power for power in range(3, 13)]
    between = [2 * size for size in fours[:-1]] if args.check else []
    rows = measure_gloo(args.nproc_per_node, sorted(fours + between), seconds=args.seconds)
    known = [row for row in rows if row.size_bytes in fours]
    constants = fit_gloo(known, args.nproc_per_node)
    note = f"{args.nproc_per_node} processes over loopback, {os.cpu_count()} cores, {args.seconds:.0f} s"
    text = cluster_toml(constants, name="gloo-here", nodes=1, ranks_per_node=args.nproc_per_node, note=note)
    write(args.output, text)
    if args.check:
        from distsim.calibration.live import check_gloo

        print(check_gloo(text, [row for row in rows if row.size_bytes in between], 1, args.nproc_per_node))
    return 0
