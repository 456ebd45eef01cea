"""One published step, simulated as a user would: `distsim run ... --report`.

Of a step of very many micro-batches two shorter ones are simulated and continued in a straight line: once a pipeline is
full, each micro-batch takes as long as the one before it. It is full with as many as it has stages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distsim.calibration.constants import data_folder
from distsim.calibration.training.rows import ALLOCATED, Row
from distsim.errors import UsageError

__all__ = ["Run", "command", "programs_folder", "simulate"]

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
