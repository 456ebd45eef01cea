"""scenarios/hangs: every fault is named as its file says."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios.scenario import load, mistakes, scenarios

from distsim.sim import RunRequest, run_program

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
FILES = scenarios("hangs")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hang_is_named(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first diagnosis of the simulated run is the one the scenario expects."""
    scenario = load(path)
    settings = scenario.settings
    outcome = run_program(
        RunRequest(
            program=str(scenario.program),
            args=list(settings.get("args", [])),
            on=settings["on"],
            nproc_per_node=settings.get("nproc_per_node"),
            seed=settings.get("seed", 0),
            host_timeout_s=settings.get("limits", {}).get("host_timeout_s"),
        )
    )
    wrong = mistakes(scenario, outcome.exit_code, [one.to_json() for one in outcome.diagnoses])
    if wrong:
        pytest.fail(f"{path.name}:\n" + "\n".join(wrong), pytrace=False)


def test_every_program_has_a_scenario() -> None:
    """No program of the folder is without its expectation, and each says what it teaches."""
    programs = set(FILES[0].parent.glob("*.py"))
    assert programs == {load(path).program for path in FILES}
    for program in programs:
        assert program.read_text().startswith('"""Teaches: '), program.name
