"""`distsim validate --training`: simulates published training steps as a user would, and holds the errors to bounds.

`rows.csv` has a step a line with the program and the flags that repeat it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from distsim.collectives.uncertainty import sized_regime, step_error, step_widening
from distsim.errors import UsageError
from distsim.report.progress import is_shown
from distsim.scenario.pool import opened, pool_of, processes
from distsim.text.untrusted_input import printable
from tools.fitting.frameworks import NotHere
from tools.fitting.rows import ALLOCATED, TABLES, Row, read_rows

__all__ = [
    "LARGEST",
    "MEDIANS",
    "MEMORY",
    "PROGRAMS",
    "SHARE",
    "Residual",
    "SimulatedRow",
    "StepSummary",
    "command",
    "held",
    "interval",
    "level",
    "quantile",
    "run",
    "simulate",
    "summarise",
    "without",
]

PROGRAMS = Path(__file__).resolve().parents[2] / "scenarios" / "training"
# -- Where a measured step lies: the spread of published steps around simulated ones, by regime and framework.
#
# Every framework has the same weight, whatever the sources that measured it: half of an error is which program runs. A
# regime that few frameworks have is held to the others, which count as `HOLD` of its own; what the host bounds is a
# matter of its own. A report adds to that spread what is known of the GPU's rates and of collectives, whose errors
# the published steps have, too. So the quantiles reach as far as `SHARE` of the frameworks that were left out need
# with all of it. Rows that are held back have no part in any.

SHARE = 0.9
"""Share of the rows of a framework that was left out that should lie in their interval. An interval is to hold eight of
ten steps that nobody has seen, and these rows flatter: the programs and the model were made in their sight. An audit of
2026-11-28 found 14 of 38 new rows where 82 % of the known ones lay inside.
"""
HOLD = 2.0
"""Number of frameworks with the weight of the assumption that a regime is like all others."""
BOUND_BY_HOST = "near launch-bound"
"""Regime whose errors are used for this regime only. It uses errors of other regimes only if it has none of its own."""
LEVELS = tuple(0.02 * step for step in range(50))
"""Shares of the known residuals between the two ends of an interval, narrowest first."""


# -- One published step, simulated as a user would: `distsim run ... --report`.
#
# Of a step of very many micro-batches two shorter ones are simulated and continued in a straight line: once a pipeline
# is full, each micro-batch takes as long as the one before it. It is full with as many as it has stages.

STEPS = 2
"""Number of simulated steps: the first creates the optimizer's state, and all later steps are equal."""


@dataclass(frozen=True)
class SimulatedRow:
    """Result of one row."""

    row: Row
    wall_s: float
    step_s: float | None = None
    peak_memory_bytes: int | None = None
    """Peak memory of the rank that needs most, allocated or reserved like the row's."""
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    micro_batches: tuple[int, int] | None = None
    """Numbers of micro-batches of the two simulated steps, if the row's step has many more."""
    regime: str | None = None
    """Regime of the step, which decides its interval."""
    gpu: str = ""
    """Data file of the GPU that was simulated."""
    launching_share: float | None = None
    """Share of the step that the host needs to launch its kernels."""
    failure: str = ""
    """Last line that a failed run printed; empty if it has figures."""
    lacking: str = ""
    """Command that brings what this machine lacks for the row."""
    likely_s: tuple[float, float] | None = None
    """Interval that the report gives the step."""
    beside: tuple[float, float] = (0.0, 0.0)
    """Half-widths, relative to the step, that the interval has without published steps: of exposed communication and
    of the GPU's rates, below and above."""
    wider: float = 1.0
    """Exponent that widens what published steps say, for the number of GPUs and for the card."""

    @property
    def step_error(self) -> float | None:
        """Return (simulated - published) / published."""
        return None if self.step_s is None else self.step_s / self.row.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Return (simulated - published) / published; None if no peak was published."""
        if self.peak_memory_bytes is None or self.row.memory_gib is None:
            return None
        return self.peak_memory_bytes / 2**30 / self.row.memory_gib - 1.0


def command(row: Row, report: Path) -> list[str]:
    """Return the command line that repeats *row*, its report as JSON in *report*."""
    ranks = () if row.nproc_per_node is None else ("--nproc-per-node", str(row.nproc_per_node))
    checkout, common = row.checkout, list[str]()
    if checkout is None:
        file, flag = str(PROGRAMS / row.program), "--steps"
    else:
        file, flag, common = row.program.partition(":")[2], checkout.steps, shlex.split(checkout.flags)
    steps = () if flag in (*common, *row.flags) else (flag, str(STEPS))
    program = (*(() if checkout is None else checkout.run), file, *common, *row.flags, *steps)
    return [
        sys.executable,
        "-m",
        "distsim",
        "run",
        "--on",
        row.on,
        "--ranks",
        "sample",
        *ranks,
        "--quiet",
        "--report",
        str(report),
        *program,
    ]


def simulate(row: Row) -> SimulatedRow:
    """Run *row* in a process of its own.

    Raises:
        UsageError: Its report has no training figures.
    """
    micro_batches_given = _flag(row.flags, "--accum")
    few = stages = _flag(row.flags, "--pp")
    if _flag(row.flags, "--vpp") > 1:
        few *= 2  # of as many as there are stages, an interleaved pipeline has another schedule
    if micro_batches_given <= 4 * few:
        return _once(row)
    more = few + stages
    shorter = [_once(replace(row, flags=_with(row.flags, "--accum", n))) for n in (few, more)]
    return _continued(row, shorter, (few, more), micro_batches_given)


def _once(row: Row) -> SimulatedRow:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        began = time.perf_counter()
        here, environ = Path.cwd(), dict(os.environ)
        if row.checkout is not None:
            here = Path(folder) / "checkout"
            environ |= row.checkout.environ
            try:
                row.checkout.put(here)
            except NotHere as lacking:
                return SimulatedRow(row, 0.0, lacking=str(lacking))
        done = subprocess.run(command(row, report), capture_output=True, text=True, check=False, cwd=here, env=environ)
        wall_s = time.perf_counter() - began
        if done.returncode or not report.is_file():
            return SimulatedRow(row, wall_s, failure=_why(done.returncode, done.stderr, done.stdout))
        return run_of(row, wall_s, json.loads(report.read_text(encoding="utf-8")))


def _continued(row: Row, shorter: Sequence[SimulatedRow], micro_batches: tuple[int, int], wanted: int) -> SimulatedRow:
    """Return the step of *wanted* micro-batches, from two that have fewer."""
    wall_s = sum(run.wall_s for run in shorter)
    few, more = shorter
    if few.step_s is None or more.step_s is None:
        return SimulatedRow(row, wall_s, failure=few.failure or more.failure, lacking=few.lacking or more.lacking)
    each_s = (more.step_s - few.step_s) / (micro_batches[1] - micro_batches[0])
    step_s = more.step_s + each_s * (wanted - micro_batches[1])
    rate = wanted / micro_batches[1] * more.step_s / step_s
    return replace(
        more,
        row=row,
        wall_s=wall_s,
        step_s=step_s,
        tokens_per_s_per_gpu=None if more.tokens_per_s_per_gpu is None else more.tokens_per_s_per_gpu * rate,
        mfu=None if more.mfu is None else more.mfu * rate,
        micro_batches=micro_batches,
        likely_s=more.likely_s and (more.likely_s[0] * step_s / more.step_s, more.likely_s[1] * step_s / more.step_s),
    )


def _flag(flags: Sequence[str], name: str) -> int:
    """Return the number that follows the flag *name*; 1 if the flag is not given."""
    return int(flags[flags.index(name) + 1]) if name in flags else 1


def _with(flags: Sequence[str], name: str, value: int) -> tuple[str, ...]:
    position = flags.index(name) + 1
    return (*flags[:position], str(value), *flags[position + 1 :])


def run_of(row: Row, wall_s: float, report: dict[str, Any]) -> SimulatedRow:
    """Return the figures of a report document."""
    training = report.get("training")
    if not training:
        raise UsageError(
            f"the report of {row.program} on {row.on} has no 'training': it ran without a simulated GPU, "
            "so there is no step to compare"
        )
    launching_s, low_s = training.get("launching_s"), training.get("step_low_s")
    beside, wider = (0.0, 0.0), 1.0
    if low_s is not None:
        of = (training["step_regime"], training["num_gpus"], training["gpu"])
        known, wider, step_s = step_error(*of), step_widening(*of), training["step_time_s"]
        below = without(1.0 - low_s / step_s, 1.0 - known.low)
        beside = (below, without(training["step_high_s"] / step_s - 1.0, known.high - 1.0))
    return SimulatedRow(
        row,
        wall_s,
        step_s=training["step_time_s"],
        peak_memory_bytes=training["peak_allocated_bytes" if row.memory_of == ALLOCATED else "peak_memory_bytes"],
        tokens_per_s_per_gpu=training.get("tokens_per_s_per_gpu"),
        mfu=training.get("mfu"),
        regime=sized_regime(training.get("step_regime"), training.get("num_gpus", 0)),
        gpu=training.get("gpu", ""),
        launching_share=None if launching_s is None else launching_s / training["step_time_s"],
        likely_s=None if low_s is None else (low_s, training["step_high_s"]),
        beside=beside,
        wider=wider,
    )


def without(whole: float, part: float) -> float:
    """Return what makes *whole* together with *part*, where squares are added."""
    return math.sqrt(max(0.0, whole**2 - part**2))


def _why(code: int, *outputs: str) -> str:
    """Return the last line that mentions an error, or else the last line of the output, or else the exit code."""
    lines: Sequence[str] = [line.strip() for output in outputs for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [""])[-1] or f"exit code {code}"


@dataclass(frozen=True, slots=True)
class Residual:
    """One published step."""

    framework: str
    regime: str
    value: float
    """Logarithm of published / simulated."""
    beside: tuple[float, float] = (0.0, 0.0)
    """As in `SimulatedRow`, like *wider*."""
    wider: float = 1.0

    def lies_in(self, low: float, high: float) -> tuple[bool, float]:
        """Return whether the published step lies in its interval, if published steps say *low* to *high*, and half of
        the interval's width, relative to the simulated step.
        """
        below = math.hypot(1.0 - low**self.wider, self.beside[0])
        above = math.hypot(high**self.wider - 1.0, self.beside[1])
        return 1.0 - below <= math.exp(self.value) <= 1.0 + above, (below + above) / 2


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of intervals on the rows of frameworks that were left out."""

    share: float
    rows: int
    frameworks: int
    half_width: float
    """The median, of the simulated step."""


def residuals_of(runs: Sequence[SimulatedRow]) -> list[Residual]:
    """Return the residuals of the rows that ran and are not held back."""
    return [
        Residual(run.row.framework, run.regime, math.log(run.row.step_s / run.step_s), run.beside, run.wider)
        for run in runs
        if run.step_s and run.regime and not run.row.held_back
    ]


def interval(residuals: Sequence[Residual], regime: str, share: float) -> tuple[float, float]:
    """Return two factors of a simulated step time between which *share* of the measured times lie. The interval
    always includes 1.
    """
    kin = [one for one in residuals if one.regime == regime or BOUND_BY_HOST not in (one.regime, regime)]
    kin = kin or list(residuals)
    own = Counter(one.framework for one in kin if one.regime == regime)
    others = Counter(one.framework for one in kin if one.regime != regime)
    held = HOLD / max(1, len(others))
    weighted = sorted(
        (one.value, 1.0 / own[one.framework] if one.regime == regime else held / others[one.framework]) for one in kin
    )
    low, high = (quantile(weighted, (1.0 + sign * share) / 2) for sign in (-1, 1))
    return math.exp(min(low, 0.0)), math.exp(max(high, 0.0))


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which *share* of the weight lies, interpolated linearly between sorted values."""
    total, reached = sum(weight for _, weight in weighted), 0.0
    before = None
    for value, weight in weighted:
        at = (reached + weight / 2) / total
        if at >= share:
            return value if before is None else before[0] + (value - before[0]) * (share - before[1]) / (at - before[1])
        before, reached = (value, at), reached + weight
    return weighted[-1][0]


def held(residuals: Sequence[Residual], share: float) -> Coverage:
    """Return how many rows lie in the interval at *share* that was made without their framework."""
    inside, widths = 0, []
    frameworks = {one.framework for one in residuals}
    for framework in frameworks:
        known = [one for one in residuals if one.framework != framework]
        for one in residuals:
            if one.framework == framework and known:
                lies_in, half_width = one.lies_in(*interval(known, one.regime, share))
                inside += lies_in
                widths.append(half_width)
    rows = max(1, len(widths))
    return Coverage(inside / rows, len(widths), len(frameworks), median(widths) if widths else math.inf)


def level(residuals: Sequence[Residual]) -> float:
    """Return the least of `LEVELS` at which `SHARE` of the rows left out lie inside; the last where none does."""
    return next((share for share in LEVELS if held(residuals, share).share >= SHARE), LEVELS[-1])


# -- Published against simulated steps, and the bounds they are held to.

MEDIANS = {"one node": 0.08, "many nodes": 0.12}
"""Median absolute error of the step, at most."""
LARGEST = 0.30
"""Largest allowed absolute error of any step."""
MEMORY = 0.10
"""Absolute error of any peak of memory, at most."""


@dataclass(frozen=True)
class StepSummary:
    """Summary of all rows."""

    runs: Sequence[SimulatedRow]
    medians: dict[str, float | None]
    """Median error for "one node" and "many nodes"; None without a row."""
    memory: float | None
    """Median absolute error of the peaks that were published."""
    unseen: float | None
    """Median absolute error of the step over rows that were not looked at before; None without any."""
    held: Coverage | None
    """Share of rows inside the intervals of frameworks that were left out; None if all rows have one framework."""
    judged: tuple[int, int] | None
    """How many of the rows that were held back lie in their interval, and how many have one."""
    broken: list[str]
    """Return a sentence for each bound that is exceeded."""

    def of(self, regime: str) -> list[SimulatedRow]:
        """Return the runs of a regime: on one node, or on several."""
        return [run for run in self.runs if _place(run) == regime]


def summarise(runs: Sequence[SimulatedRow]) -> StepSummary:
    """Return the medians and the bounds that are exceeded. A row that did not run counts as exceeding one."""
    broken = [f"{run.row.name}: it did not run: {run.failure}" for run in runs if run.failure]
    medians: dict[str, float | None] = {}
    for regime, bound in MEDIANS.items():
        errors = [abs(run.step_error) for run in runs if _place(run) == regime and run.step_error is not None]
        middle = medians[regime] = median(errors) if errors else None
        if middle is not None and middle > bound:
            broken.append(f"the step on {regime}: median error {middle:.1%}, at most {bound:.0%}")
    for run in runs:
        if run.step_error is not None and abs(run.step_error) > LARGEST:
            broken.append(f"{run.row.name}: the step is {run.step_error:+.1%} off, at most {LARGEST:.0%}")
        if run.memory_error is not None and abs(run.memory_error) > MEMORY:
            broken.append(f"{run.row.name}: memory is {run.memory_error:+.1%} off, at most {MEMORY:.0%}")
    memory = [abs(run.memory_error) for run in runs if run.memory_error is not None]
    unseen = [abs(run.step_error) for run in runs if run.row.unseen and run.step_error is not None]
    residuals = residuals_of(runs)
    judged = [
        run.likely_s[0] <= run.row.step_s <= run.likely_s[1] for run in runs if run.row.held_back and run.likely_s
    ]
    return StepSummary(
        runs,
        medians,
        median(memory) if memory else None,
        median(unseen) if unseen else None,
        held(residuals, level(residuals)) if len({one.framework for one in residuals}) > 1 else None,
        (sum(judged), len(judged)) if judged else None,
        broken,
    )


def _place(run: SimulatedRow) -> str:
    return "one node" if run.row.num_nodes == 1 else "many nodes"


# -- The table that `distsim validate --training` prints.

EXPECTATION_FAILED = 5
"""Exit code if an error exceeds its bound."""
_FIGURES = "  step, s simulated   error    GiB simul.   error  wall"
"""The columns after the name: published and simulated step, published and simulated memory, and the time that the
simulation took."""


def run(args: argparse.Namespace) -> int:
    """Simulate and compare, the rows on the pool of `--pool`. Return 0, or 5 if an error bound is exceeded."""
    rows = [row for row in read_rows(Path(args.folder) if args.folder else None) if args.table in row.name]
    if not rows:
        raise UsageError(f"no row's name contains {args.table!r}: the rows are in rows.csv")
    live = is_shown(sys.stderr)
    width = max(80, min(120, shutil.get_terminal_size((100, 24)).columns)) - len(_FIGURES)
    rows.sort(key=lambda row: list(TABLES).index(row.table))
    runs: list[SimulatedRow] = []
    began = time.perf_counter()
    pool = pool_of(args) or processes(args.usual_workers)
    with opened(pool):
        coming = pool.map(simulate, rows)
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
    return EXPECTATION_FAILED if summary.broken else 0


def line_of(run: SimulatedRow, width: int) -> str:
    """Return a row of the table, *width* columns for its name and the rest for its figures."""
    name = printable(run.row.name) + (" *" if run.micro_batches else "") + (" ?" if run.row.unseen else "")
    name = name if len(name) <= width else name[: width - 1] + "…"
    if run.lacking:
        return f"{name:{width}}{run.row.step_s:>9.4g}  left out: {run.lacking}"
    if run.step_s is None or run.step_error is None:
        return f"{name:{width}}{run.row.step_s:>9.4g}  did not run: {printable(run.failure)}"
    published = "-" if run.row.memory_gib is None else f"{run.row.memory_gib:.1f}"
    simulated = "-" if run.peak_memory_bytes is None else f"{run.peak_memory_bytes / 2**30:.1f}"
    error = "-" if run.memory_error is None else f"{run.memory_error:+.1%}"
    step = f"{run.row.step_s:>9.4g}{run.step_s:>10.4g}{run.step_error:>+8.1%}"
    return f"{name:{width}}{step}{published:>7s}{simulated:>7s}{error:>8s}{run.wall_s:>5.0f}s"


def print_summary(summary: StepSummary, seconds: float) -> None:
    """Print the medians beside their bounds, the broken bounds, and the elapsed time."""
    for regime, middle in summary.medians.items():
        if middle is not None:
            bound = f"(at most {MEDIANS[regime]:.0%})"
            print(f"{regime:>10s}: {len(summary.of(regime)):2d} rows, median error of the step {middle:.1%} {bound}")
    frameworks: dict[str, list[float]] = defaultdict(list)
    for run in summary.runs:
        if run.step_error is not None:
            frameworks[run.row.framework].append(run.step_error)
    for name, errors in sorted(frameworks.items()):
        signed, sizes = median(errors), median(map(abs, errors))
        print(f"{printable(name)}: {len(errors)} rows, median of the errors {signed:+.1%}, of their sizes {sizes:.1%}")
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
            f"{summary.held.share:.0%} of {summary.held.rows} rows of {summary.held.frameworks} frameworks lie in an "
            f"interval that was made without their framework; the median half-width is {summary.held.half_width:.1%}"
        )
    left_out = sum(bool(run.lacking) for run in summary.runs)
    if left_out:
        print(f"{left_out} rows of frameworks that are not here were left out")
    if summary.judged:
        print("{} of {} rows that are held back for judging lie in their interval".format(*summary.judged))
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
    rows = []
    for run in summary.runs:
        row = run.row
        entry: dict[str, Any] = {"table": row.table, "name": row.name, "on": row.on, "program": row.program}
        entry |= {"flags": list(row.flags), "published_step_s": row.step_s, "published_memory_GiB": row.memory_gib}
        entry |= {"step_time_s": run.step_s, "peak_memory_bytes": run.peak_memory_bytes}
        entry |= {"tokens_per_s_per_gpu": run.tokens_per_s_per_gpu, "mfu": run.mfu, "wall_s": run.wall_s}
        entry |= {"regime": run.regime, "launching_share": run.launching_share, "source": row.source}
        entry |= {"micro_batches_simulated": run.micro_batches, "unseen": row.unseen}
        entry |= {"framework": row.framework, "held_back": row.held_back, "likely_s": run.likely_s, "gpu": run.gpu}
        entry |= {"beside": run.beside, "wider": run.wider}
        rows.append(entry | {"step_error": run.step_error, "memory_error": run.memory_error, "failure": run.failure})
        rows[-1] |= {"lacking": run.lacking}
    return {
        "schema": "distsim.training_validation/1",
        "rows": rows,
        "medians": summary.medians,
        "memory_median": summary.memory,
        "unseen_median": summary.unseen,
        "judged": summary.judged,
        "intervals": None if summary.held is None else asdict(summary.held),
        "broken": summary.broken,
    }
