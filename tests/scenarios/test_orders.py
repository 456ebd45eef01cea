"""scenarios/orders: ten bugs of orders, found in their broken forms and excluded in their cured ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distsim.scenario import find_scenarios, load_scenario
from distsim.scenario.explore.budget import Budget
from distsim.scenario.explore.scenarios import ExploredScenario, explore_scenario
from distsim.scenario.run import observe, simulate_scenario
from distsim.sim.kernel.chooser import Orders, Usual
from tests.kin import one_in

ROOT = Path(__file__).parents[2] / "scenarios" / "orders"


def explored(name: str) -> ExploredScenario:
    scenario = load_scenario(ROOT / f"{name}.toml")
    return explore_scenario(scenario, Budget(), scenario.spec.explore_faults, lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing", "classes", "cured", "words"),
    [
        ("checkpoint_thread", 1, 1, 1, ""),
        ("counter_barrier", 1, 1, 300, ""),
        ("group_made_again", 1, 1, 1, ""),
        ("lease", 2, 4, 6, 'rank 1: times out: wait "alive" (line 26)'),
        ("number_of_attempt", 1, 2, 1, 'rank 1: check "attempt" (line 20)  before  rank 0: set "attempt" (line 15)'),
        ("results_of_rounds", 2, 6, 4, "receive 2 of rank 0 (line 19) takes the message of rank 1 (usually rank 2)"),
        ("retry_alone", 1, 2, 1, 'rank 1: check "checkpoint" (line 19)  before  rank 0: set "checkpoint" (line 16)'),
        ("store_owner_leaves", 1, 2, 1, "rank 0: ends, and with it its store  before  rank 1: wait"),
        ("two_updates", 4, 6, 2, 'rank 1: check "active" (line 17)  before  rank 0: set "active" (line 19)'),
        ("weights_while_read", 2, 4, 2, 'rank 1: get "second" (line 26)  before  rank 0: set "second" (line 21)'),
    ],
)
def test_broken_is_found_and_cured_is_proven(name: str, failing: int, classes: int, cured: int, words: str) -> None:
    """The numbers of classes are exact; the words name the two lines."""
    broken = explored(f"{name}_broken")
    assert broken.result.passed
    assert broken.explored.failing is not None
    assert (broken.explored.failing_classes, broken.explored.classes) == (failing, classes)
    assert words in "\n".join(broken.explored.failing.words)
    healthy = explored(f"{name}_cured")
    assert healthy.result.passed, healthy.text
    assert healthy.explored.is_proof
    assert healthy.explored.classes == cured


@pytest.mark.slow
def test_the_string_repeats_the_failure_in_another_process() -> None:
    """What is printed is what fails again, elsewhere."""
    failing = explored("two_updates_broken").explored.failing
    assert failing is not None
    command = [sys.executable, "-m", "distsim", "scenario", "run", str(ROOT / "two_updates_broken.toml")]
    run = subprocess.run([*command, "--replay", failing.replay], capture_output=True, text=True, check=False)
    assert run.returncode == 5
    assert "AssertionError: two updates at once" in run.stdout


OTHERS = [path for path in find_scenarios([ROOT.parent / "hangs", ROOT.parent / "healthy"]) if path.stem != "timeout"]
"""All but the one whose sleep is longer than a limit, which an exploration does not let strike."""


@pytest.mark.slow
@pytest.mark.parametrize("path", one_in(8, OTHERS), ids=lambda path: path.stem)
def test_the_usual_order_has_the_verdict_of_an_ordinary_run(path: Path) -> None:
    """Time orders nothing in an exploration, and a scenario's expectations hold nevertheless."""
    scenario = load_scenario(path)
    outcome, output, conditions = simulate_scenario(scenario, Orders(Usual()))
    assert observe(scenario, outcome, output, conditions).wrong == []
