"""scenarios/hangs: every fault is named as its file says, simulated, and as real ranks end of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.scenario import find_scenarios, load_scenario, run_scenario
from distsim.scenario.run import observe, simulate_scenario
from tests.scenarios.as_on_gloo import endings

ROOT = Path(__file__).parents[2] / "scenarios"
FILES = find_scenarios([ROOT / "hangs"])
OTHERWISE = {
    "aliased_outputs": "it is a warning, and ranks that all were killed are an error",
    "never_waited": "it is a warning, and ranks that all were killed are an error",
}
"""Programs of whose real ranks, ended so, something else is told, and why."""
SLOW = {"spins", "polls_a_tensor"}  # they wait for the watchdog, which has real seconds

pytestmark = pytest.mark.filterwarnings("ignore")  # a program's warnings are its own


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in SLOW else ()) for p in FILES],
)
def test_hang_is_named(path: Path) -> None:
    """The first diagnosis of the simulated run is the one the scenario expects; and so it is where the same ranks have
    been ended by their launcher, are on their way out, or have lost the connection to who is gone."""
    scenario = load_scenario(path)
    outcome, output, conditions = simulate_scenario(scenario)
    result = observe(scenario, outcome, output, conditions)
    if not result.passed:
        pytest.fail(f"{path.name}:\n{result.text}", pytrace=False)
    if path.stem in OTHERWISE or not outcome.diagnoses:
        return
    assert outcome.evidence is not None
    told = outcome.diagnoses[0]
    for how, evidence in endings(outcome.evidence):
        first = diagnose(evidence)[0]
        assert (how, first.kind, first.culprits) == (how, told.kind, told.culprits), first.explanation


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven_iterations", "swallowed_exception", "skipped_at_the_end", "os_exit"])
def test_the_file_holds_for_real(name: str) -> None:
    """`--backend gloo`: kind, culprits, call, lines and exit code as expected; test_twins has the kinds of all."""
    scenario = load_scenario(ROOT / "hangs" / f"{name}.toml")
    result = run_scenario(scenario.changed(backend="gloo", limits={"wall_time_s": 240}))  # a busy machine starts slowly
    if not result.passed:
        pytest.fail(result.text, pytrace=False)
