"""Whole programs in the simulator: each faulty one is found by its kind, and is silent once repaired."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distsim.debug.diagnosis.silent.finding import SilentFinding
from distsim.sim.run import RunRequest, run_program

PROGRAMS = Path(__file__).parent / "programs"
FAULTY = {
    "s01_skip_load": "replicas_differ_at_start",
    "s03_update_one": "changed_outside_step",
    "s13_wrong_group": "replicas_differ_at_start",
    "s16_opt_state": "optimizer_state_differs",
    "s24_no_sync_always": "replicas_diverge",
    "s25_bypass_ddp": "replicas_diverge",
}
"""Programs with one fault each, and the kind that names it; with the argument `fixed` they have none."""
HEALTHY = sorted(path.stem for path in PROGRAMS.glob("h*.py"))


def findings(name: str, *arguments: str, silent: str = "watch") -> tuple[int, list[SilentFinding]]:
    """Exit code and silent findings of a program in the simulator."""
    path = PROGRAMS / f"{name}.py"
    ranks = re.search(r"ranks: (\d+)", path.read_text(encoding="utf-8"))
    assert ranks is not None
    nproc = min(int(ranks[1]), 2)
    outcome = run_program(
        RunRequest(
            program=str(path),
            args=list(arguments),
            on="ethernet-cpu:2",
            nproc_per_node=nproc,
            nnodes=int(ranks[1]) // nproc,
            silent=silent,
        )
    )
    return outcome.exit_code, outcome.silent


@pytest.mark.parametrize("name", sorted(FAULTY))
def test_a_faulty_program_is_found_by_its_kind(name: str) -> None:
    """Each planted fault is a finding, and the program still ends with exit code 0."""
    code, silent = findings(name)
    assert code == 0
    assert FAULTY[name] in [finding.kind.value for finding in silent]


@pytest.mark.parametrize("name", sorted(FAULTY))
def test_a_repaired_program_is_silent(name: str) -> None:
    """Without its fault the same program has no finding."""
    assert findings(name, "fixed") == (0, [])


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_look_alike_is_silent(name: str) -> None:
    """What looks like a fault and is none is not accused."""
    assert findings(name) == (0, [])


def test_strict_makes_an_error_an_exit_code() -> None:
    """Exit code 5: the ranks finished, and the end alone proves nothing."""
    assert findings("s01_skip_load", silent="strict")[0] == 5
    assert findings("s01_skip_load", "fixed", silent="strict")[0] == 0


def test_off_looks_at_nothing() -> None:
    """Without the search there is no finding."""
    assert findings("s01_skip_load", silent="off") == (0, [])
