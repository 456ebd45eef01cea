"""scenarios/hangs: every fault is named as its file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.scenario import find_scenarios, load_scenario, run_scenario

ROOT = Path(__file__).parents[2] / "scenarios"
FILES = find_scenarios([ROOT / "hangs"])
SLOW = {"spins", "polls_a_tensor"}  # they wait for the watchdog, which has real seconds

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in SLOW else ()) for p in FILES],
)
def test_hang_is_named(path: Path) -> None:
    """The first diagnosis of the simulated run is the one the scenario expects."""
    result = run_scenario(load_scenario(path))
    if not result.passed:
        pytest.fail(f"{path.name}:\n{result.text}", pytrace=False)
