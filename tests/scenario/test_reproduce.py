"""From flight records to the smallest scenario with the same diagnosis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distsim.debug.diagnosis import diagnose
from distsim.debug.kinds import Kind
from distsim.debug.postmortem import Found
from distsim.errors import UsageError
from distsim.scenario import find_scenarios, load_scenario, run_scenario
from distsim.scenario import reproduce as reproduce_module
from distsim.scenario.calls import calls_of
from distsim.scenario.run import simulate_scenario
from tests.scenario.made import made

HANGS = Path(__file__).parents[2] / "scenarios" / "hangs"
REPRODUCED = (
    "skipped_at_the_end",
    "skipped_in_the_middle",
    "shape_mismatch",
    "dtype_mismatch",
    "reduce_op_mismatch",
    "root_mismatch",
    "op_mismatch",
    "crossed_recvs",
    "crossed_sends",
    "ring_of_sends",
    "two_groups_crossed",
    "three_groups_crossed",
    "unmatched_recv",
    "unmatched_send",
    "p2p_size_mismatch",
    "wrong_tag",
    "uneven_iterations",
    "raises",
    "os_exit",
    "new_group_order",
    "never_joins",
)


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_hang_is_reproduced_from_its_records(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written scenario has the same diagnosis, of no more ranks and calls, and passes."""
    outcome, _, _ = simulate_scenario(load_scenario(HANGS / f"{name}.toml"))
    assert outcome.evidence is not None
    found = Found(outcome.diagnoses or diagnose(outcome.evidence), outcome.evidence)
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    lines = list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    assert lines[-1].startswith("run it: distsim scenario run ")
    again = load_scenario(tmp_path / "again.toml")
    assert again.spec.expect.kind == found.diagnoses[0].kind.value
    assert again.world_size <= outcome.world_size
    result = run_scenario(again)
    assert result.wrong == []


def test_every_rank_and_call_that_is_left_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped call among many: two ranks and a handful of calls are left."""
    outcome, _, _ = simulate_scenario(load_scenario(HANGS / "skipped_at_the_end.toml"))
    assert outcome.evidence is not None
    found = Found(outcome.diagnoses, outcome.evidence)
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    again = load_scenario(tmp_path / "again.toml")
    assert again.world_size == 2
    assert (tmp_path / "again.py").read_text().count("dist.") <= 4
    whole = calls_of(outcome.evidence)
    assert sum(map(len, whole.calls.values())) > 4


LEFT_OUT_IN_A_LOOP = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
t = torch.ones(4)
for step in range(5):
    dist.all_reduce(t)
    if step == 2 and dist.get_rank() == 1:
        continue
    dist.broadcast(t, src=0)
"""


def test_a_call_left_out_in_a_loop_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records have no loops: a round left out may be called a missing rank or uneven iterations, and that is said."""
    scenario = made(tmp_path, '[expect]\nkind = "missing_rank"\nculprits = [1]\n', LEFT_OUT_IN_A_LOOP)
    outcome, _, _ = simulate_scenario(scenario)
    assert outcome.evidence is not None
    # A real job's rings end where it hung; the simulator looked four calls further.
    real = {rank: [call for call in calls if call.seq <= 6] for rank, calls in outcome.evidence.records.items()}
    found = Found(outcome.diagnoses, replace(outcome.evidence, records=real))
    assert found.diagnoses[0].kind is Kind.MISSING_RANK
    monkeypatch.setattr(reproduce_module, "examine", lambda directory: found)
    lines = list(reproduce_module.reproduce(tmp_path, tmp_path / "again.toml"))
    again = load_scenario(tmp_path / "again.toml")
    assert again.world_size == 2
    assert run_scenario(again).wrong == []
    other = again.spec.expect.kind != Kind.MISSING_RANK.value
    assert any(line.startswith("note: simulated it is called uneven iterations") for line in lines) == other


def test_nothing_is_overwritten_and_nothing_made_up(tmp_path: Path) -> None:
    """A folder without records, a file that exists: one line each."""
    with pytest.raises(UsageError, match="neither rings"):
        list(reproduce_module.reproduce(tmp_path, tmp_path / "x.toml"))
    (tmp_path / "x.py").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        list(reproduce_module.reproduce(tmp_path, tmp_path / "x.toml"))
    assert find_scenarios([HANGS])
