"""Simulates the published training steps as a user would, and checks their errors against bounds."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from distsim.calibration.constants import data_folder
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, read_bytes

__all__ = [
    "LARGEST",
    "MEDIANS",
    "MEMORY",
    "SHARE",
    "TABLES",
    "Residual",
    "Row",
    "SimulatedRow",
    "StepSummary",
    "command",
    "held",
    "interval",
    "level",
    "programs_folder",
    "read_rows",
    "simulate",
    "source_of",
    "summarise",
]

TABLES = {"steps": "Published steps, one node to many", "node": "Published steps on one node"}
"""The values of column `table`, and the headings they are printed under."""
ALLOCATED, RESERVED = "allocated", "reserved"
_COLUMNS = ("table", "name", "on", "program", "flags", "step_s", "source")
_LARGEST_FILE = 16 << 20
# -- Where a measured step lies: the spread of published steps around simulated ones, by regime and source.
#
# Every source has the same weight, since the rows of one share their framework, machine and way to measure. A regime
# that few sources have is held to the others: those count as much as `HOLD` sources of its own; what the host bounds
# is a matter of its own. How far the quantiles reach is asked of sources that were left out: as far as `SHARE` of them
# needs, each against intervals that it had no part in.

SHARE = 0.8
"""Share of the rows of a source that was not fitted that should lie in their interval."""
HOLD = 2.0
"""Number of sources with the weight of the assumption that a regime is like all others."""
BOUND_BY_HOST = "near launch-bound"
"""Regime whose errors are used for this regime only. It uses errors of other regimes only if it has none of its own."""
LEVELS = tuple(0.80 + 0.01 * step for step in range(20))
"""Shares of the known residuals between the two ends of an interval; more where too few of the unknown lie inside."""
_REPOSITORY = re.compile(r"github(?:\.com/|:)([\w.-]+/[\w.-]+)")
_PAPER = re.compile(r"arXiv:[\d.]+")


@dataclass(frozen=True)
class Row:
    """One published step, and the program that repeats it."""

    table: str
    name: str
    on: str
    """A preset with its nodes."""
    nproc_per_node: int | None
    """Ranks of a node, where not all its GPUs took part."""
    program: str
    flags: tuple[str, ...]
    step_s: float
    memory_gib: float | None
    """Published peak memory of the fullest GPU in GiB, if there is one."""
    source: str
    memory_of: str = RESERVED
    """Published kind of peak memory: torch's max_memory_allocated or max_memory_reserved."""
    unseen: bool = False
    """Whether the row was not looked at while the model and the programs were changed."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes behind the colon of the preset's name; 1 if there is none."""
        _, _, nodes = self.on.partition(":")
        return int(nodes or 1)


def read_rows(folder: Path | None = None) -> list[Row]:
    """Return the rows of *folder*/rows.csv (by default those that come with distsim); UsageError with every fault."""
    path = (folder or data_folder() / "training") / "rows.csv"
    try:
        text = read_bytes(path, _LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"expected {path} (columns {', '.join(_COLUMNS)}, ...): {reason}") from None
    rows: list[Row] = []
    faults: list[str] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for number, fields in enumerate(csv.DictReader(lines), 1):
        entry = {
            key: (value or "").strip()
            for key, value in fields.items()
            if isinstance(key, str) and not isinstance(value, list)
        }
        try:
            rows.append(_row(entry))
        except ValueError as error:
            faults.append(f"{path}: row {number}: {error}")
    if faults or not rows:
        raise UsageError("\n".join(faults) or f"{path} has no rows")
    return rows


def _row(entry: dict[str, str]) -> Row:
    lacking = [key for key in _COLUMNS if not entry.get(key)]
    if lacking:
        raise ValueError(f"{', '.join(lacking)}: expected a value")
    nodes = entry["on"].partition(":")[2]
    if nodes and not nodes.isdecimal():
        raise ValueError(f"on: expected PRESET:NODES, got {brief(entry['on'])}")
    nproc, memory = entry.get("nproc_per_node", ""), entry.get("memory_GiB", "")
    return Row(
        table=_one_of("table", entry["table"], tuple(TABLES)),
        name=entry["name"],
        on=entry["on"],
        nproc_per_node=int(_positive("nproc_per_node", nproc)) if nproc else None,
        program=entry["program"],
        flags=tuple(shlex.split(entry["flags"])),
        step_s=_positive("step_s", entry["step_s"]),
        memory_gib=_positive("memory_GiB", memory) if memory else None,
        source=entry["source"],
        memory_of=_one_of("memory_of", entry.get("memory_of", "") or RESERVED, (ALLOCATED, RESERVED)),
        unseen=_yes("unseen", entry.get("unseen", "")),
    )


def _one_of(key: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise ValueError(f"{key}: expected {' or '.join(known)}, got {brief(text)}")
    return text


def _yes(key: str, text: str) -> bool:
    if text not in ("", "yes"):
        raise ValueError(f"{key}: expected yes or nothing, got {brief(text)}")
    return text == "yes"


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < inf:
        raise ValueError(f"{key}: expected a number above 0, got {brief(text)}")
    return value


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
    launching_share: float | None = None
    """Share of the step that the host needs to launch its kernels."""
    failure: str = ""
    """Last line that a failed run printed; empty if it has figures."""

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


def programs_folder() -> Path:
    """Return scenarios/training of the clone that distsim runs from, or of the working directory."""
    for root in (data_folder().resolve().parents[1], Path.cwd()):
        folder = root / "scenarios" / "training"
        if (folder / "fsdp2.py").is_file():
            return folder
    raise UsageError(
        "validate --training runs the programs of scenarios/training, which are in the repository and not in an "
        "installed distsim: run it in the top folder of a clone"
    )


def command(row: Row, report: Path, programs: Path) -> list[str]:
    """Return the command line that repeats *row*, its report as JSON in *report*."""
    ranks = () if row.nproc_per_node is None else ("--nproc-per-node", str(row.nproc_per_node))
    steps = () if "--steps" in row.flags else ("--steps", str(STEPS))
    program = (str(programs / row.program), *row.flags, *steps)
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


def simulate(row: Row, programs: Path) -> SimulatedRow:
    """Run *row* in a process of its own.

    Raises:
        UsageError: Its report has no training figures.
    """
    micro_batches_given = _flag(row.flags, "--accum")
    few = stages = _flag(row.flags, "--pp")
    if _flag(row.flags, "--vpp") > 1:
        few *= 2  # of as many as there are stages, an interleaved pipeline has another schedule
    if micro_batches_given <= 4 * few:
        return _once(row, programs)
    more = few + stages
    shorter = [_once(replace(row, flags=_with(row.flags, "--accum", n)), programs) for n in (few, more)]
    return _continued(row, shorter, (few, more), micro_batches_given)


def _once(row: Row, programs: Path) -> SimulatedRow:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        began = time.perf_counter()
        done = subprocess.run(command(row, report, programs), capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - began
        if done.returncode or not report.is_file():
            return SimulatedRow(row, wall_s, failure=_why(done.returncode, done.stderr, done.stdout))
        return run_of(row, wall_s, json.loads(report.read_text(encoding="utf-8")))


def _continued(row: Row, shorter: Sequence[SimulatedRow], micro_batches: tuple[int, int], wanted: int) -> SimulatedRow:
    """Return the step of *wanted* micro-batches, from two that have fewer."""
    wall_s = sum(run.wall_s for run in shorter)
    few, more = shorter
    if few.step_s is None or more.step_s is None:
        return SimulatedRow(row, wall_s, failure=few.failure or more.failure)
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
    launching_s = training.get("launching_s")
    return SimulatedRow(
        row,
        wall_s,
        step_s=training["step_time_s"],
        peak_memory_bytes=training["peak_allocated_bytes" if row.memory_of == ALLOCATED else "peak_memory_bytes"],
        tokens_per_s_per_gpu=training.get("tokens_per_s_per_gpu"),
        mfu=training.get("mfu"),
        regime=training.get("step_regime"),
        launching_share=None if launching_s is None else launching_s / training["step_time_s"],
    )


def _why(code: int, *outputs: str) -> str:
    """Return the last line that mentions an error, or else the last line of the output, or else the exit code."""
    lines: Sequence[str] = [line.strip() for output in outputs for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [""])[-1] or f"exit code {code}"


@dataclass(frozen=True, slots=True)
class Residual:
    """One published step."""

    source: str
    regime: str
    value: float
    """Logarithm of published / simulated."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of intervals on the rows of sources that were left out."""

    share: float
    rows: int
    sources: int
    half_width: float
    """The median, of the simulated step."""


def source_of(text: str) -> str:
    """Return the repository or paper that a row's source names, whatever the file in it."""
    match = _REPOSITORY.search(text) or _PAPER.search(text)
    return match.group(match.lastindex or 0) if match else text


def residuals_of(runs: Sequence[SimulatedRow]) -> list[Residual]:
    """Return the residuals of the rows that ran."""
    return [
        Residual(source_of(run.row.source), run.regime, math.log(run.row.step_s / run.step_s))
        for run in runs
        if run.step_s and run.regime
    ]


def interval(residuals: Sequence[Residual], regime: str, share: float) -> tuple[float, float]:
    """Return two factors of a simulated step time between which *share* of the measured times lie. The interval
    always includes 1.
    """
    kin = [one for one in residuals if one.regime == regime or BOUND_BY_HOST not in (one.regime, regime)]
    kin = kin or list(residuals)
    own = Counter(one.source for one in kin if one.regime == regime)
    others = Counter(one.source for one in kin if one.regime != regime)
    held = HOLD / max(1, len(others))
    weighted = sorted(
        (one.value, 1.0 / own[one.source] if one.regime == regime else held / others[one.source]) for one in kin
    )
    low, high = (_quantile(weighted, (1.0 + sign * share) / 2) for sign in (-1, 1))
    return math.exp(min(low, 0.0)), math.exp(max(high, 0.0))


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
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
    """Return how many rows lie in the interval at *share* that was made without their source."""
    inside, widths = 0, []
    sources = {one.source for one in residuals}
    for source in sources:
        known = [one for one in residuals if one.source != source]
        for one in residuals:
            if one.source == source and known:
                low, high = interval(known, one.regime, share)
                inside += low <= math.exp(one.value) <= high
                widths.append((high - low) / 2)
    rows = max(1, len(widths))
    return Coverage(inside / rows, len(widths), len(sources), median(widths) if widths else math.inf)


def level(residuals: Sequence[Residual]) -> float:
    """Return the least of `LEVELS` at which `SHARE` of the rows of left out sources lie inside; the last where none
    does.
    """
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
    """Share of rows inside the intervals of sources that were left out; None if all rows have one source."""
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
    several = len({one.source for one in residuals}) > 1
    return StepSummary(
        runs,
        medians,
        median(memory) if memory else None,
        median(unseen) if unseen else None,
        held(residuals, level(residuals)) if several else None,
        broken,
    )


def _place(run: SimulatedRow) -> str:
    return "one node" if run.row.num_nodes == 1 else "many nodes"
