"""Explores the orders of one scenario: `--explore`, or `explore = "all"` in its file."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distsim.errors import UsageError
from distsim.scenario.expect.result import Result, replay_command, report_width
from distsim.scenario.explore.budget import Budget
from distsim.scenario.explore.faults import wrong_under_fault
from distsim.scenario.explore.search import Attempt, Explored, OrderSearch, RunResult
from distsim.scenario.explore.workers import ScenarioWorkers
from distsim.scenario.file.load import Scenario, program_text
from distsim.scenario.pool import PointPool
from distsim.scenario.run import observe, simulate_scenario
from distsim.sim.kernel.chooser import Orders, ReplayString

OF_TIME = ("step_time", "virtual_time_below_s", "busbw_above", "utilisation_below")
"""Expectations about times, which say nothing about orders."""


@dataclass(slots=True)
class ExploredScenario:
    """Result of an exploration."""

    scenario: Scenario
    explored: Explored
    result: Result
    """Result of the failing order, or that of the usual one; its report begins with what was explored."""

    @property
    def lines(self) -> list[str]:
        """Return what was explored, and under which order the scenario fails."""
        explored, failing = self.explored, self.explored.failing
        lines = [f"{self.scenario.name}: {explored.summary}"]
        lines += [f"  {line}" for line in explored.details]
        if failing is not None and failing.words:
            lines += ["  fails if", *(f"    {line}" for line in failing.words)]
        return [part for line in lines for part in _wrapped(line)]

    @property
    def text(self) -> str:
        """Return the lines, and how to repeat a failing order; if it was not expected, also the report."""
        if not self.result.passed:
            report = (f"    {line}".rstrip() if line else "" for line in self.result.text.splitlines())
            return "\n".join([f"FAILED {self.scenario.name}", *report])
        first, *rest = self.lines
        if self.explored.failing is not None:
            rest += ["  which the file expects (failing_orders)", f"  replay: {self.result.replay}"]
        return "\n".join([f"ok     {first}", *rest])


def _wrapped(line: str) -> list[str]:
    """Return a line in lines of at most `report_width` columns."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = report_width()
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def explore_scenario(
    scenario: Scenario,
    budget: Budget,
    kinds: Sequence[str],
    on_progress: Callable[[Explored], None],
    pool: PointPool | None = None,
) -> ExploredScenario:
    """Run *scenario* in its orders, as far as the budget goes.

    Args:
        scenario: What to run. Its expectations of times are left out.
        budget: How much to try.
        kinds: What else to try (budget.KINDS).
        on_progress: Called after each run.
        pool: Where most of the runs take place (`workers.warmed`); None: in this process.

    Raises:
        DistsimError: The scenario cannot run, or all of too many orders are asked for.
    """
    if scenario.spec.backend == "gloo":
        raise UsageError("--explore: orders are those of a simulation: use backend = 'sim'")
    expect = {key: value for key, value in scenario.data.get("expect", {}).items() if key not in OF_TIME}
    scenario = scenario.changed(expect=expect)
    main_file = "" if scenario.file is None else scenario.file.name
    search = OrderSearch(
        attempt_of(scenario),
        budget,
        kinds,
        program_hash(scenario),
        main_file,
        on_progress,
        None if pool is None else ScenarioWorkers(pool, scenario, attempt_of),
    )
    explored = search.run()
    failing = explored.failing
    ran = failing.ran if failing is not None else explored.first
    result: Result = Result(scenario.name, str(scenario.path)) if ran is None else ran.payload
    if explored.not_repeatable:
        result = replace(result, wrong=["expected a program that does the same after the same choices"], replay="")
    elif failing is None:
        result = replace(result, wrong=[])
    elif failing.words:
        result = replace(result, replay=replay_command(scenario, failing.replay))
    if scenario.spec.expect.failing_orders and not explored.not_repeatable:
        expected = "expect.failing_orders: expected an order under which the scenario fails"
        result = replace(result, wrong=[] if failing is not None else [f"{expected}, got: {explored.headline}"])
    done = ExploredScenario(scenario, explored, replace(result, wall_s=explored.wall_s))
    done.result.orders = [*done.lines, *explored.last_lines]
    if not done.result.passed:
        done.result = replace(done.result, report="\n".join([*done.lines, "", done.result.report]))
    return done


def attempt_of(scenario: Scenario) -> Attempt:
    """Return the function that runs *scenario* once in some order."""
    program = program_hash(scenario)

    def attempt(orders: Orders) -> RunResult:
        outcome, output, conditions = simulate_scenario(scenario, orders)
        replay = "" if orders.trace.is_cut else str(ReplayString.of(orders, program))
        result = observe(scenario, outcome, output, conditions, replay=replay, brief=True)
        wrong = wrong_under_fault(orders, outcome, scenario.spec.expect_fault)
        if wrong:
            result.wrong = [wrong, *result.wrong]
        failed = not result.passed if wrong is None else bool(wrong)
        return RunResult(failed, result.verdict, (result.verdict, tuple(result.wrong), result.output), result)

    return attempt


def program_hash(scenario: Scenario) -> str:
    """Return four digits that change with the program of a scenario and its arguments."""
    text = scenario.spec.program if scenario.file is None else program_text(scenario.file)
    return hashlib.sha256(f"{text}{scenario.spec.args}{scenario.world_size}".encode()).hexdigest()[:4]


def replayed(scenario: Scenario, text: str) -> ReplayString:
    """Return the choices that *text* names, for a run of *scenario*.

    Raises:
        UsageError: It is no replay string, or one of another program.
    """
    string = ReplayString.parse(text)
    if scenario.spec.backend == "gloo":
        raise UsageError("--replay: orders are those of a simulation: use backend = 'sim'")
    string.check_program(program_hash(scenario), scenario.name)
    return string
