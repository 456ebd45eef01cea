"""Simulated programs that give their processes other ranks, or have several worlds, run as real ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.sim.run import RunRequest, run_program

CASES = Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize(
    ("program", "ranks"), [("remapped_messages", 3), ("weight_update_group", 4), ("world_of_one_first", 2)]
)
def test_processes_of_several_worlds_meet(program: str, ranks: int) -> None:
    """By the numbers of each world, and nobody is accused."""
    path = CASES / "healthy" / f"{program}.py"
    outcome = run_program(RunRequest(str(path), on="ethernet-cpu:1", nproc_per_node=ranks))
    assert outcome.diagnoses == []
    assert outcome.exit_code == 0


def test_a_further_world_is_diagnosed_in_the_numbers_of_the_job() -> None:
    """The world's ranks 0, 1 and 2 are the job's 0, 2 and 3: its last rank leaves out a call of the others."""
    program = CASES / "uneven" / "further_world.py"
    outcome = run_program(RunRequest(str(program), on="ethernet-cpu:1", nproc_per_node=4))
    diagnosis = outcome.diagnoses[0]
    assert diagnosis.group is not None
    assert diagnosis.group.ranks == (0, 2, 3)
    assert diagnosis.culprits == (3,)
    assert diagnosis.explanation.startswith("Ranks 0,2 make all_reduce")
    waiting = [n for n, line in enumerate(program.read_text().splitlines(), 1) if "dist.all_reduce" in line]
    assert {rank for rank, site in diagnosis.sites.items() if site.line in waiting} == {0, 2}
