"""The published training steps, and each of them simulated as a user would."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from distsim.calibration.constants import data_folder
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, read_bytes

__all__ = ["ALLOCATED", "TABLES", "Row", "Run", "command", "programs_folder", "read_rows", "simulate"]

TABLES = {"steps": "Published steps, one node to many", "node": "Published steps on one node"}
"""The values of column `table`, and the headings they are printed under."""
ALLOCATED, RESERVED = "allocated", "reserved"
_COLUMNS = ("table", "name", "on", "program", "flags", "step_s", "source")
_LARGEST_FILE = 16 << 20


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
    """The most on a GPU, in GiB, where it was published."""
    source: str
    memory_of: str = RESERVED
    """What of the memory was published: torch's max_memory_allocated or max_memory_reserved."""
    unseen: bool = False
    """Whether nobody looked at it while the model and the programs were mended."""

    @property
    def num_nodes(self) -> int:
        """1 where the preset's name has none behind its colon."""
        _, _, nodes = self.on.partition(":")
        return int(nodes or 1)


def read_rows(folder: Path | None = None) -> list[Row]:
    """The rows of *folder*/rows.csv (by default those that come with distsim); UsageError with every fault."""
    path = (folder or data_folder() / "training") / "rows.csv"
    try:
        text = read_bytes(path, _LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expected {path} (columns {', '.join(_COLUMNS)}, ...): {error}") from None
    rows: list[Row] = []
    faults: list[str] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for number, found in enumerate(csv.DictReader(lines), 1):
        entry = {
            key: (value or "").strip()
            for key, value in found.items()
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
"""The first makes the optimizer's state; those after it are alike: the report's
step, of more the median of steps 3 on, is here the second."""


@dataclass(frozen=True)
class Run:
    """What came of a row."""

    row: Row
    wall_s: float
    step_s: float | None = None
    peak_memory_bytes: int | None = None
    """Of the rank with most, allocated or reserved as the row says."""
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    micro_batches: tuple[int, int] | None = None
    """Of the two steps that were simulated, where the row's has many more."""
    regime: str | None = None
    """What the errors of its step go by, as its report says."""
    launching_share: float | None = None
    """Of its step, that the host needs to launch its kernels."""
    failure: str = ""
    """Why there are no figures: the last line that the run wrote."""

    @property
    def step_error(self) -> float | None:
        """(simulated - published) / published."""
        return None if self.step_s is None else self.step_s / self.row.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """(simulated - published) / published, where the peak was published."""
        if self.peak_memory_bytes is None or self.row.memory_gib is None:
            return None
        return self.peak_memory_bytes / 2**30 / self.row.memory_gib - 1.0


def programs_folder() -> Path:
    """scenarios/training of the clone that distsim runs from, or of the working directory."""
    for root in (data_folder().resolve().parents[1], Path.cwd()):
        folder = root / "scenarios" / "training"
        if (folder / "fsdp2.py").is_file():
            return folder
    raise UsageError(
        "validate --training runs the programs of scenarios/training, which are in the repository and not in an "
        "installed distsim: run it in the top folder of a clone"
    )


def command(row: Row, report: Path, programs: Path) -> list[str]:
    """The command line that repeats *row*, its report as JSON in *report*."""
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


def simulate(row: Row, programs: Path) -> Run:
    """Run *row* in a process of its own. UsageError where its report has no figures of training at all."""
    asked = _flag(row.flags, "--accum")
    few = stages = _flag(row.flags, "--pp")
    if _flag(row.flags, "--vpp") > 1:
        few *= 2  # of as many as there are stages, an interleaved pipeline has another schedule
    if asked <= 4 * few:
        return _once(row, programs)
    more = few + stages
    shorter = [_once(replace(row, flags=_with(row.flags, "--accum", n)), programs) for n in (few, more)]
    return _continued(row, shorter, (few, more), asked)


def _once(row: Row, programs: Path) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        began = time.perf_counter()
        done = subprocess.run(command(row, report, programs), capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - began
        if done.returncode or not report.is_file():
            return Run(row, wall_s, failure=_why(done.returncode, done.stderr, done.stdout))
        return run_of(row, wall_s, json.loads(report.read_text(encoding="utf-8")))


def _continued(row: Row, shorter: Sequence[Run], micro_batches: tuple[int, int], asked: int) -> Run:
    """The step of *asked* micro-batches, from two that have fewer."""
    wall_s = sum(run.wall_s for run in shorter)
    few, more = shorter
    if few.step_s is None or more.step_s is None:
        return Run(row, wall_s, failure=few.failure or more.failure)
    each_s = (more.step_s - few.step_s) / (micro_batches[1] - micro_batches[0])
    step_s = more.step_s + each_s * (asked - micro_batches[1])
    rate = asked / micro_batches[1] * more.step_s / step_s
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
    """The number behind *name*; 1 where it is left out."""
    return int(flags[flags.index(name) + 1]) if name in flags else 1


def _with(flags: Sequence[str], name: str, value: int) -> tuple[str, ...]:
    place = flags.index(name) + 1
    return (*flags[:place], str(value), *flags[place + 1 :])


def run_of(row: Row, wall_s: float, report: dict[str, Any]) -> Run:
    """The figures of a report document."""
    training = report.get("training")
    if not training:
        raise UsageError(
            f"the report of {row.program} on {row.on} has no 'training': it ran without a simulated GPU, "
            "so there is no step to compare"
        )
    launching_s = training.get("launching_s")
    return Run(
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
    """The first line that says it, else the exit code."""
    lines: Sequence[str] = [line.strip() for output in outputs for line in output.splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line]
    return (told or lines or [""])[-1] or f"exit code {code}"
