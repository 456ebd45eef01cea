"""Classic mistakes, each a small program: the same verdict from its simulation, from gloo, and from gloo at strict.

Kind, culprits, whether it is a tie, exit code, line and the report's first line agree, in a world of two (where
nothing but the program can tell who is wrong) and of four.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from jobs import Zygote, ring_directory

from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.render import render_diagnoses
from distsim.sim.run import RunRequest, run_program

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
TIES = ("as many here as there", "as many as there", "says who", "says whose", "is split evenly")
FROM_ZYGOTE = "zygote.py"


@dataclass(frozen=True)
class Verdict:
    """What a report says."""

    kind: str
    culprits: tuple[int, ...]
    tie: bool
    exit_code: int
    line: int
    """Where the first culprit is, or was last."""


def same(kind: str, culprit: int, line: int, *, tie: bool = False, exit_code: int = 3) -> dict[int, Verdict]:
    """The verdict in worlds of two, where it may be a tie, and of four, where it is none."""
    return {ranks: Verdict(kind, (culprit,), tie and ranks == 2, exit_code, line) for ranks in (2, 4)}


EXPECTED = {
    "accumulation": same("uneven_iterations", 1, 16, tie=True),
    "compute_alone": same("extra_collective", 0, 15, exit_code=4),
    "early_return": same("missing_rank", 1, 20),
    "evaluate_alone": same("extra_collective", 0, 8, exit_code=4),
    "evaluate_at_end": same("extra_collective", 0, 8, exit_code=4),
    "last_batch_smaller": same("shape_mismatch", 1, 11, exit_code=4),
    "other_branch": same("op_mismatch", 1, 13, tie=True, exit_code=4),
    "other_dtype": same("dtype_mismatch", 1, 14, tie=True, exit_code=4),
    "other_root": same("root_mismatch", 1, 12, tie=True, exit_code=4),
    "raises": same("rank_raised", 1, 9, exit_code=1),
    "restart_without_broadcast": same("missing_rank", 1, 19),
    "save_alone": same("extra_collective", 0, 9, exit_code=4),
    "stops_early": same("uneven_iterations", 1, 12, tie=True),
    "uneven_loop": {
        2: Verdict("uneven_iterations", (1,), True, 3, 11),
        4: Verdict("uneven_iterations", (0,), False, 3, 11),
    },
    "uneven_then_barrier": same("uneven_iterations", 1, 18, tie=True),
}


def test_every_program_has_its_verdict() -> None:
    """No program is without one, and no verdict without a program."""
    assert sorted(EXPECTED) == sorted(path.stem for path in PROGRAMS.glob("*.py"))


def told(diagnosis: Diagnosis, exit_code: int, at_exit: int = 0) -> Verdict:
    """What a diagnosis says; *at_exit* is the line of a rank that is on its way out, which is the zygote's business."""
    site = diagnosis.sites.get(diagnosis.culprits[0])
    if site is not None and site.file.endswith(FROM_ZYGOTE):
        site = replace(site, line=at_exit)
    return Verdict(
        diagnosis.kind.value,
        diagnosis.culprits,
        any(word in diagnosis.explanation for word in TIES),
        exit_code,
        0 if site is None else site.line,
    )


def first_line(report: str) -> str:
    """Without its first word, which is what became of the job, and without the time that it took."""
    return re.sub(r"^\w+  |\s+(at once|after [\d.]+ \w+)$", "", report.splitlines()[0])


def simulated(name: str, ranks: int) -> tuple[Diagnosis, int]:
    """The first diagnosis of a simulation, and its exit code."""
    outcome = run_program(RunRequest(program=str(PROGRAMS / f"{name}.py"), nproc_per_node=ranks))
    return outcome.diagnoses[0], outcome.exit_code


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_simulated(name: str, ranks: int) -> None:
    """The simulation tells the mistake."""
    assert told(*simulated(name, ranks)) == EXPECTED[name][ranks]


def case(name: str, ranks: int, level: str) -> Any:
    """The suite runs one of a kind, .ci/soak all."""
    marks = [pytest.mark.slow]
    if (name, ranks, level) not in {("evaluate_alone", 2, "check"), ("early_return", 2, "strict")}:
        marks.append(pytest.mark.soak)
    return pytest.param(name, ranks, level, marks=marks, id=f"{name}-{ranks}-{level}")


@pytest.mark.parametrize(
    ("name", "ranks", "level"),
    [case(name, ranks, level) for name in sorted(EXPECTED) for ranks in (2, 4) for level in ("check", "strict")],
)
def test_real(name: str, ranks: int, level: str, zygote: Zygote) -> None:
    """gloo tells it as the simulation does: kind, culprits, tie, exit code, line, the user's frames, the first line."""
    with ring_directory() as folder:
        result = zygote.run(PROGRAMS / f"{name}.py", ranks, directory=folder, level=level, hang_after_s=6.0)
    assert result.diagnoses, result.outputs
    real, (virtual, _) = result.diagnoses[0], simulated(name, ranks)
    expected = EXPECTED[name][ranks]
    assert told(real, result.exit_code, expected.line) == expected, result.report
    if any(site.file.endswith(FROM_ZYGOTE) for site in real.sites.values()):
        return
    assert first_line(render_diagnoses([real]).plain(110)) == first_line(render_diagnoses([virtual]).plain(110))
    for rank in virtual.culprits:
        if rank in virtual.sites and rank in real.sites:
            assert real.sites[rank] == virtual.sites[rank]
