"""Simulated programs that give their processes other ranks, or have several worlds, run as real ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim.run import RunRequest, run_program

PROGRAMS = Path(__file__).parents[1] / "realexec" / "healthy"


@pytest.mark.parametrize(
    ("program", "ranks"), [("remapped_messages", 3), ("weight_update_group", 4), ("world_of_one_first", 2)]
)
def test_processes_of_several_worlds_meet(program: str, ranks: int) -> None:
    """By the numbers of each world, and nobody is accused."""
    outcome = run_program(RunRequest(str(PROGRAMS / f"{program}.py"), on="ethernet-cpu:1", nproc_per_node=ranks))
    assert outcome.diagnoses == []
    assert outcome.exit_code == 0
