"""From Flight Recorder dumps of real gloo jobs that hung (dumps/hang.py) to scenarios that hang alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.debug.postmortem import examine
from distsim.debug.records.kinds import Kind
from distsim.scenario import load_scenario, run_scenario
from distsim.scenario.reproduce.reproduce import reproduce
from tests.kin import one_in

DUMPS = Path(__file__).parent / "dumps"
"""Their program is said to be /gone/f/hang.py, so that its text, which would tell more, is nowhere."""
CASES = {
    "missing": (Kind.MISSING_RANK, (2,), 2, 1),
    "branch": (Kind.OP_MISMATCH, (1,), 2, 2),
    "branch_json": (Kind.OP_MISMATCH, (1,), 2, 2),
    "shape": (Kind.SHAPE_MISMATCH, (3,), 2, 2),
    "shape_json": (Kind.SHAPE_MISMATCH, (3,), 2, 2),
    "mixed": (Kind.OP_MISMATCH, (0,), 3, 2),
}


@pytest.mark.parametrize("case", one_in(6, CASES, first=2))
def test_dumps_become_a_small_scenario_with_the_same_diagnosis(case: str, tmp_path: Path) -> None:
    """Kind and culprits are those of the dumps, of as few ranks and lines as it takes; dumps say no root and no
    reduction, and JSON no lines."""
    kind, culprits, num_ranks, num_calls = CASES[case]
    first = examine(DUMPS / case).diagnoses[0]
    assert (first.kind, first.culprits) == (kind, culprits)
    list(reproduce(DUMPS / case, tmp_path / "again.toml"))
    again = load_scenario(tmp_path / "again.toml")
    assert again.spec.expect.kind == kind.value
    assert again.world_size == num_ranks
    body = (tmp_path / "again.py").read_text().partition("rank = dist.get_rank()")[2]
    assert body.count("dist.") == num_calls, body
    result = run_scenario(again)
    assert result.wrong == []
    assert result.kind == kind.value
    assert len(result.culprits) == len(culprits)


@pytest.mark.soak
def test_without_shrinking_every_rank_and_call_is_kept(tmp_path: Path) -> None:
    """Broadcasts, scatters and object collectives whose roots nobody recorded run on sim up to the fault."""
    lines = list(reproduce(DUMPS / "mixed", tmp_path / "again.toml", shrink=False))
    assert any("4 of 4 ranks, 60 of 60 calls" in line for line in lines)
    program = (tmp_path / "again.py").read_text()
    assert "dist.broadcast(torch.zeros(8), src=0)  # hang.py:" in program
    assert run_scenario(load_scenario(tmp_path / "again.toml")).wrong == []
