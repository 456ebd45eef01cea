"""Schedules: races are found, shrunk, and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.errors import UsageError
from distsim.scenario import run_scenario
from distsim.scenario.explore import Explored, explore
from distsim.scenario.file.load import Scenario
from distsim.sim.kernel.schedule import CallDelay, Schedule
from tests.scenario.made import RACE, STEPS, made

BUFFERED = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(1)
if rank < 2:
    dist.send(t, 1 - rank)
    dist.recv(t, 1 - rank)
dist.barrier()
"""


@pytest.mark.parametrize(
    "text", ["ordinary", "rank2@5+0.1s", "rank0@1+0.002s,rank3@4+1s,buffered,any=17", "rank1@0+1e+06s"]
)
def test_a_schedule_survives_its_text(text: str) -> None:
    """What is printed is what replays."""
    assert str(Schedule.parse(text)) == text


@pytest.mark.parametrize("text", ["rank2", "any=x", "rank1@2+3", "rank1@2+1..2s"])
def test_other_text_is_refused(text: str) -> None:
    """A mistyped schedule is one line."""
    with pytest.raises(UsageError, match="expected a schedule"):
        Schedule.parse(text)


def test_a_drawn_schedule_is_its_seeds() -> None:
    """The same seed gives the same schedule, another seed another."""
    drawn = [str(Schedule.draw(seed, [5, 5, 5, 5], 1.0)) for seed in range(40)]
    assert drawn == [str(Schedule.draw(seed, [5, 5, 5, 5], 1.0)) for seed in range(40)]
    assert len(set(drawn)) > 35
    assert any("buffered" in text for text in drawn)
    assert any("any=" in text for text in drawn)


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scenario, Explored]:
    """A scenario with a race, and what 30 schedules found."""
    scenario = made(tmp_path_factory.mktemp("race"), "[expect]", RACE)
    return scenario, explore(scenario, 30)


def test_an_any_source_race_is_found_and_shrunk(race: tuple[Scenario, Explored]) -> None:
    """The ordinary run passes; of 30 schedules some fail, and one delay of rank 1 is enough."""
    scenario, found = race
    assert run_scenario(scenario).passed
    assert found.num_failing > 0
    assert found.schedule is not None
    assert len(found.schedule.delays) + (found.schedule.any_source is not None) == 1
    assert "rank 1 came last" in found.text


def test_the_printed_schedule_replays_the_failure(race: tuple[Scenario, Explored]) -> None:
    """Bit for bit, as often as one likes."""
    scenario, found = race
    assert found.failing is not None
    again = [run_scenario(scenario.changed(schedule=str(found.schedule))) for _ in range(2)]
    assert [r.document for r in again] == [found.failing.document] * 2
    assert f"--schedule {found.schedule}" in found.failing.replay.replace("'", "")


def test_a_program_without_a_race_passes_under_all(tmp_path: Path) -> None:
    """No false alarm: delays move time, not results."""
    found = explore(made(tmp_path, "[expect]\nprints = { 0 = ['rank 0 has 256'] }"), 10)
    assert found.num_failing == 0
    assert STEPS
    assert found.text.endswith("10 schedules, 0 fail")


def test_sends_may_be_buffered(tmp_path: Path) -> None:
    """Two ranks that send first hang as on gloo, and pass where sends are buffered as on MPI."""
    scenario = made(tmp_path, "[expect]", BUFFERED)
    assert run_scenario(scenario).kind == "deadlock_cycle"
    assert run_scenario(scenario.changed(schedule="buffered")).passed


def test_a_delay_holds_one_rank_back(tmp_path: Path) -> None:
    """The rank's call number and all after it come later by that much."""
    scenario = made(tmp_path, "[expect]")
    held = run_scenario(scenario.changed(schedule=str(Schedule((CallDelay(1, 2, 5.0),)))))
    assert held.passed
    assert 5.0 < held.virtual_time_s < 5.1
