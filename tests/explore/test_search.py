"""What a search does with its budget and reports, on programs of abstract steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsim.errors import UsageError
from distsim.scenario.explore.budget import Budget, check_kinds
from distsim.scenario.explore.search import OrderSearch, RunResult, TooManyOrders, pct_bound
from distsim.sim.kernel.chooser import Orders, Priorities, ReplayString
from distsim.sim.kernel.steps import Trace
from tests.explore.searches import steps_of
from tests.explore.test_tree import Program, run

WRITERS: Program = {f"{actor}.0": [("w", "x")] for actor in range(4)}
ROUNDS: Program = {f"{actor}.0": [("w", f"{number}") for number in range(9)] for actor in range(2)}


def attempts(program: Program, fails: Callable[[Trace], bool]) -> Callable[[Orders], RunResult]:
    """Return runs of *program* that fail if their trace says so."""

    def attempt(orders: Orders) -> RunResult:
        run(program, orders)
        failed = fails(orders.trace)
        return RunResult(failed, "wrong" if failed else "", failed)

    return attempt


def never(_: Trace) -> bool:
    return False


def last_is_first(trace: Trace) -> bool:
    """Whether the last writer goes before all others."""
    return bool(trace.steps) and trace.steps[0].offer.actor == "3.0"


def test_all_classes_are_a_proof() -> None:
    """24 classes, and the usual run twice more."""
    explored = OrderSearch(attempts(WRITERS, never), Budget()).run()
    assert (explored.classes, explored.runs, explored.is_proof) == (24, 26, True)
    assert explored.headline == "all 24 classes of orders: none fails"


def test_the_simplest_failing_order_is_reported() -> None:
    """Six classes fail; the shown one has the three pairs that must differ, and its string repeats it."""
    attempt = attempts(WRITERS, last_is_first)
    explored = OrderSearch(attempt, Budget(), program="beef").run()
    assert explored.headline == "6 of 24 classes fail"
    assert explored.failing is not None
    assert explored.failing.words == [f"rank 3: w x  before  rank {rank}: w x" for rank in range(3)]
    assert explored.failing.replay == "x1:0=3.0-beef"
    again = ReplayString.parse(explored.failing.replay).orders()
    assert attempt(again).failed
    assert steps_of(again.trace) == ["3.0 w x", "0.0 w x", "1.0 w x", "2.0 w x"]


def test_a_budget_is_shared_with_random_priorities_if_all_does_not_fit() -> None:
    """What was run, a lower bound of all, and what the random half finds at least."""
    explored = OrderSearch(attempts(ROUNDS, never), Budget(runs=40)).run()
    assert not explored.is_exhausted
    assert explored.runs == 40
    assert explored.headline.startswith("not exhausted: 40 runs, ")
    assert explored.least >= 2**9
    assert explored.bounds.startswith("PCT, 2 actors, 18 steps, 20 runs: a bug of 3 orderings is found with at least ")


def test_too_many_orders_are_refused_after_one_run() -> None:
    """All of them would take longer than an hour."""
    rounds = {f"{actor}.0": [("w", f"{number}") for number in range(60)] for actor in range(2)}
    with pytest.raises(TooManyOrders, match=r"at least 1,152,921,504,606,846,976 classes"):
        OrderSearch(attempts(rounds, never), Budget()).run()


def test_a_run_that_does_not_repeat_is_named() -> None:
    """Run 2 repeats run 1; other output with the same calls is a difference as well."""
    runs = 0

    def attempt(orders: Orders) -> RunResult:
        nonlocal runs
        runs += 1
        run(WRITERS, orders)
        return RunResult(False, "", ("healthy", f"begun\nat {runs}\n"))

    explored = OrderSearch(attempt, Budget()).run()
    assert explored.headline == (
        "not repeatable: run 2 made the same calls as run 1, and its output or its errors were different: "
        "at 2, where it was at 1 before"
    )


def test_random_priorities_find_more_than_their_bound() -> None:
    """In 400 runs, the failing order of four writers: at least as often as the theorem says."""
    failing = 0
    for seed in range(400):
        orders = Orders(Priorities(seed, 4, 2))
        run(WRITERS, orders)
        failing += last_is_first(orders.trace)
    assert failing / 400 >= pct_bound(4, 4, 2, 1)


@pytest.mark.parametrize(
    "text",
    [
        "x1:",
        "x1:4=1.0,9=0<2#1-7f3a",
        "x1:buffered",
        "x1:timeouts,1=0.0!-dd74",
        "x1:dies=2@7,3=p5.1",
        "x1:dies=2@7,loses=0@1",
    ],
)
def test_a_string_survives_its_text(text: str) -> None:
    """What is printed is what replays."""
    assert str(ReplayString.parse(text)) == text


@pytest.mark.parametrize("text", ["", "x1", "x1:4", "x1:a=1.0", "x1:4=1.0-xyz", "buffered", "x1:4=1.0;5=2.0"])
def test_other_text_is_refused(text: str) -> None:
    """A mistyped string is one line."""
    with pytest.raises(UsageError, match="expected a string that an exploration prints"):
        ReplayString.parse(text)


@pytest.mark.parametrize("value", ["some", "0", 0, -1, "1e3", "60", True, "0s", "s"])
def test_a_budget_is_all_a_number_or_a_time(value: str | int) -> None:
    """Anything else is refused, but a number as text is a number."""
    if value == "60":
        assert Budget.read(value) == Budget(runs=60)
        return
    with pytest.raises(UsageError, match="expected 'all', a number of runs"):
        Budget.read(value)


def test_kinds_of_faults_come_as_a_list_or_with_commas() -> None:
    """Each is named once."""
    assert check_kinds("kill,timeout,kill") == ("kill", "timeout")
    assert check_kinds(["buffered"]) == ("buffered",)
    with pytest.raises(UsageError, match="expected some of kill, store-loss, timeout, buffered, got 'rain'"):
        check_kinds("kill,rain")
    with pytest.raises(UsageError, match=r"^slow: expected some of .*: a rank's speed orders nothing"):
        check_kinds("slow")
