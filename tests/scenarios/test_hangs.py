"""scenarios/hangs for real; tests/cases runs them simulated, and their programs on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.scenario import load_scenario, run_scenario

ROOT = Path(__file__).parents[2] / "scenarios"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven_iterations", "swallowed_exception", "skipped_at_the_end", "os_exit"])
def test_the_file_holds_for_real(name: str) -> None:
    """`--backend gloo`: kind, culprits, call, lines and exit code as expected."""
    scenario = load_scenario(ROOT / "hangs" / f"{name}.toml")
    result = run_scenario(scenario.changed(backend="gloo", limits={"wall_time_s": 240}))  # a busy machine starts slowly
    if not result.passed:
        pytest.fail(result.text, pytrace=False)
