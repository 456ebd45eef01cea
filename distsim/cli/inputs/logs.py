"""`distsim calibrate --from LOGS`: what nccl-tests printed becomes a cluster file."""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import UsageError
from distsim.text.untrusted_input import folded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from distsim.calibration.compare import Bench
    from distsim.calibration.constants import Constants
    from distsim.calibration.logs.fit import FitToLogs

__all__ = ["run_logs", "write"]

_WIDE = 120


def run_logs(args: argparse.Namespace) -> int:
    """Read, check, fit, show and write; return 0. If the file goes to stdout, all other output goes to stderr."""
    from distsim.calibration.constants import nccl_constants
    from distsim.calibration.logs.fit import benches_of, bounds, fit_to_logs, spreads
    from distsim.calibration.logs.folder import agreed, fits, read_logs
    from distsim.calibration.logs.output import bars, cluster_file, svg, table, told, worse

    say = _stderr if args.output is None else print
    folder = Path(args.folder)
    logs = agreed(read_logs(folder))
    cluster, lent = fits(logs, args.like)
    for note in (*folded(list(logs.notes)), *lent):
        say(f"note: {note}")
    say(f"{len(logs.runs)} runs in {len({run.file for run in logs.runs})} logs: {told(logs)}")
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
        write(args.plot, svg(benches, before, after, f"{name}: {told(logs)}"), say)
    errors = spreads(benches, fitted.after)
    write(args.output, cluster_file(logs, fitted, errors, cluster, args.like, name, folder.name or str(folder)))
    return 0


def _stderr(text: str) -> None:
    print(text, file=sys.stderr)


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


def write(output: str | None, text: str, say: Callable[[str], None] = print) -> None:
    """Write *text* to the file *output* and report that with *say*; without *output* print it."""
    if output is None:
        print(text, end="")
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from None
    say(f"wrote {output}")
