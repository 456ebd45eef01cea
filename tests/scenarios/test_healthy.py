"""scenarios/healthy: unmodified programs, simulated and on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios.printed import lines_of, printed_for_real
from scenarios.scenario import load, mistakes, scenarios

from distsim.sim import Outcome, RunRequest, run_program

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own
FILES = scenarios("healthy")


def simulated(path: Path, on: str | None = None) -> Outcome:
    scenario = load(path)
    settings = scenario.settings
    request = RunRequest(
        program=str(scenario.program),
        args=list(settings.get("args", [])),
        on=on or settings["on"],
        nproc_per_node=None if on else settings.get("nproc_per_node"),
    )
    return run_program(request)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_prints_what_gloo_prints(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A simulated program is healthy and prints the very lines that it prints on gloo."""
    scenario = load(path)
    outcome = simulated(path)
    printed, errors = capfd.readouterr()
    wrong = mistakes(scenario, outcome.exit_code, [one.to_json() for one in outcome.diagnoses])
    assert not wrong, "\n".join([*wrong, errors[-1000:]])
    expected = printed_for_real(scenario.program)
    assert expected, "a program that prints nothing cannot be compared"
    assert lines_of(printed, prefixed=True) == expected


@pytest.mark.slow
def test_first_command_of_the_readme_is_deterministic(capfd: pytest.CaptureFixture[str]) -> None:
    """ddp_mlp.py on two GPU nodes prints the same twice, speeds included, and its loss falls."""
    path = next(path for path in FILES if path.stem == "ddp_mlp")
    simulated(path, on="dgx-h100:2")
    first = capfd.readouterr().out
    simulated(path, on="dgx-h100:2")
    assert capfd.readouterr().out == first
    losses = [float(line.split()[-4]) for line in first.splitlines() if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]


def test_every_program_has_a_scenario() -> None:
    """No program of the folder is without its expectation, and each says what it teaches."""
    programs = set(FILES[0].parent.glob("*.py"))
    assert programs == {load(path).program for path in FILES}
    for program in programs:
        assert program.read_text().startswith('"""Teaches: '), program.name
