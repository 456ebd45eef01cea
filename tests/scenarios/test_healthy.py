"""scenarios/healthy: unmodified programs, simulated and on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios.printed import lines_of, printed_for_real

from distsim.scenario import find_scenarios, load_scenario, run_scenario
from distsim.sim import RunRequest, run_program
from tests.kin import one_in

ROOT = Path(__file__).parents[2] / "scenarios"
FILES = find_scenarios([ROOT / "healthy"])

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own


@pytest.mark.slow
@pytest.mark.parametrize("path", one_in(12, FILES, first=2), ids=lambda path: path.stem)
def test_prints_what_gloo_prints(path: Path) -> None:
    """A simulated program is healthy and prints the very lines that it prints on gloo."""
    result = run_scenario(load_scenario(path))
    assert result.passed, result.text
    expected = printed_for_real(path.with_suffix(".py"))
    assert expected, "a program that prints nothing cannot be compared"
    assert lines_of(result.output, prefixed=True) == expected


@pytest.mark.soak
@pytest.mark.slow
def test_first_command_of_the_readme_is_deterministic(capfd: pytest.CaptureFixture[str]) -> None:
    """ddp_mlp.py on two GPU nodes prints the same twice, speeds included, and its loss falls."""
    request = RunRequest(program=str(ROOT / "healthy" / "ddp_mlp.py"), on="dgx-h100:2")
    assert run_program(request).exit_code == 0
    first = capfd.readouterr().out
    assert run_program(request).exit_code == 0
    assert capfd.readouterr().out == first
    losses = [float(line.split("loss")[1].split()[0]) for line in first.splitlines() if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]
