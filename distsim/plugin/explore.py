"""Tests whose orders are explored: `@pytest.mark.ranks(4, explore="all")`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from distsim.errors import UsageError
from distsim.plugin.options import PluginOptions
from distsim.plugin.sim_fixtures import KeptState
from distsim.plugin.verdict import Verdict, columns
from distsim.scenario.explore.budget import Budget
from distsim.scenario.explore.search import Explored, OrderSearch, RunResult, TooManyOrders
from distsim.scenario.explore.words import differences
from distsim.scenario.run import captured
from distsim.sim.kernel.chooser import Drawn, Orders, ReplayString, Usual

RunOnce = Callable[[Orders], Verdict]


def run_explored(
    item: pytest.Function,
    body: functools.partial[Any],
    kwargs: Mapping[str, Any],
    options: PluginOptions,
    run_once: RunOnce,
) -> Verdict:
    """Run *body* once for each class of orders, as far as the budget goes.

    Args:
        item: The test.
        body: Its function.
        kwargs: Values of its fixtures.
        options: Its marker.
        run_once: Runs it once in some order.

    Returns:
        The verdict of the failing order, or that of the usual one.
    """
    __tracebackhide__ = True
    program = program_hash(body, options)
    replay = item.config.getoption("--distsim-replay")
    if replay is not None:
        try:
            string = ReplayString.parse(replay, "--distsim-replay")
            string.check_program(program, "this test")
            orders = string.orders()
            verdict = run_once(orders)
            string.check_reached(orders.trace)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        verdict.replay = f"pytest '{item.nodeid}' --distsim-replay '{replay}'"
        return verdict
    explore = options.explore
    if explore is None:
        explore = item.config.getoption("--distsim-explore")
    assert explore is not None
    draw = _drawing()
    if draw is not None and explore != "all":
        return _drawn(item, run_once, draw, "timeout" in options.faults_explored)
    state = KeptState(body, kwargs, item.instance)

    def attempt(orders: Orders) -> RunResult:
        state.restore()
        with captured() as printed:
            verdict = run_once(orders)
        verdict.output = printed()
        wrong = verdict.wrong_under_fault
        failed = verdict.has_failed(options.n) if wrong is None else bool(wrong)
        if wrong:
            verdict.report = f"{wrong}\n{verdict.report}"
        errors = tuple((rank, report.headline) for rank, report in sorted(verdict.ranks.items()))
        first_line = verdict.report.partition("\n")[0]
        kind = first_line or "; ".join(sorted({report.headline for report in verdict.ranks.values()}))
        return RunResult(failed, kind, (errors, first_line, verdict.output), verdict)

    try:
        search = OrderSearch(attempt, Budget.read(explore), options.faults_explored, program, item.path.name)
        explored = search.run()
    except (TooManyOrders, UsageError) as error:
        raise pytest.UsageError(str(error)) from None
    leaked = state.changed
    state.restore()
    return _judged(item, explored, leaked)


def _drawn(item: pytest.Function, run_once: RunOnce, draw: Callable[[int], int], timeouts: bool) -> Verdict:
    """Run an example of hypothesis in an order that is drawn with it."""
    __tracebackhide__ = True
    orders = Orders(Drawn(draw), explores_timeouts=timeouts)
    verdict = run_once(orders)
    if verdict.report or any(report.kind == "failed" for report in verdict.ranks.values()):
        usual = Orders(Usual(), explores_timeouts=timeouts)
        with captured():
            run_once(usual)
        if any(step.offer.id != step.usual for step in orders.trace.steps):
            words = differences(usual.trace, orders.trace, item.path.name)
            verdict.orders = ["fails if", *(f"  {line}" for line in words)]
    return verdict


def _judged(item: pytest.Function, explored: Explored, leaked: list[str]) -> Verdict:
    """Return the verdict on a test whose orders were explored."""
    failing, usual = explored.failing, explored.first
    ran = failing.ran if failing is not None else usual
    verdict: Verdict = Verdict() if ran is None else ran.payload
    if verdict.output:
        print(verdict.output, end="")
    if explored.not_repeatable:
        verdict = Verdict()
        why = f": {' and '.join(leaked)} outlives a run" if leaked else ""
        text = textwrap.fill(f"{explored.headline}{why}", columns(), break_long_words=False)
        verdict.report = f"{text}\nMake what the ranks change in the test itself."
    elif failing is not None:
        test = item.config.cwd_relative_nodeid(item.nodeid)
        if failing.words:
            verdict.orders = ["fails if", *(f"  {line}" for line in failing.words), explored.headline]
            verdict.replay = f"pytest '{test}' --distsim-replay '{failing.replay}'"
    examples: list[Explored] = vars(item).setdefault("distsim_explored", [])
    examples.append(explored)
    lines = [explored.summary, *explored.details]
    if len(examples) > 1:  # of hypothesis
        most = max(one.classes for one in examples)
        proven = sum(one.is_proof for one in examples)
        lines[0] = f"{len(examples):,} examples of up to {most:,} classes of orders: {proven:,} proven, none fails"
    item.user_properties[:] = [one for one in item.user_properties if one[0] not in ("orders", "orders by line")]
    item.user_properties.append(("orders", "\n".join(lines)))
    if explored.last_lines:
        item.user_properties.append(("orders by line", "\n".join(explored.last_lines)))
    return verdict


def program_hash(body: Callable[..., Any], options: PluginOptions) -> str:
    """Return four digits that change with the text of a test."""
    function = inspect.unwrap(getattr(body, "func", body))
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(function, "__code__", None))
    return hashlib.sha256(f"{text}{options.n}".encode()).hexdigest()[:4]


def _drawing() -> Callable[[int], int] | None:
    """Return the function that draws an index from the current example of hypothesis; None outside of one."""
    control = sys.modules.get("hypothesis.control")
    context = None if control is None else control._current_build_context.value
    if context is None:
        return None
    return lambda count: int(context.data.draw_integer(0, count - 1))


def is_explored(options: PluginOptions, config: pytest.Config) -> bool:
    """Return whether a test is to run in other orders than that of virtual time."""
    is_marked = options.explore is not None or config.getoption("--distsim-explore") is not None
    return options.on == "sim" and (is_marked or config.getoption("--distsim-replay") is not None)
