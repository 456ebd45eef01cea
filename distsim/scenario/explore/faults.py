"""Judges a run after a fault or an early limit: ranks end, or fail with right data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from distsim.debug.records import CallWait, Phase

if TYPE_CHECKING:
    from distsim.debug.records import RankState
    from distsim.sim.kernel.chooser import Orders
    from distsim.sim.outcome import Outcome

ExpectFault = Callable[["Outcome"], bool] | Literal["error"] | None
"""What is right after a fault: `error` if another rank fails, or what a function says of the outcome."""


def wrong_under_fault(orders: Orders, outcome: Outcome, expect: ExpectFault = None) -> str | None:
    """Return why a run in which a fault or an early limit strikes ends as it should not.

    It is empty for a run that ends as it should, and None for one without a fault and an early limit.
    """
    if not orders.strikes and not any(step.offer.id.endswith("!") for step in orders.trace.steps):
        return None
    if callable(expect):
        try:
            answer = expect(outcome)
        except Exception as error:
            return f"expect_fault: the function raised {type(error).__name__}: {error}"
        return "" if answer else f"expect_fault: the function returned {answer!r}; expected True where the end is right"
    dead = {strike.rank for strike in orders.strikes if strike.kind == "kill"}
    others = [one for one in outcome.ranks if one.rank not in dead]
    fails = not others or any(one.exit_code for one in others) or bool(_blocked(outcome))
    if is_unsafe(outcome):
        return "after a fault or an early limit, a rank fails an assertion or waits for ever"
    return "expect_fault: expected an error of a rank that goes on" if expect == "error" and not fails else ""


def is_unsafe(outcome: Outcome) -> bool:
    """Return whether a rank fails an assertion, or waits for ever, after another one has died or a limit has struck.

    A call of a group has a timeout, so that it ends; a wait for a key, a lock or a thread may have none.
    """
    wrong = any(failure.type == "AssertionError" for failure in outcome.failures)
    return wrong or any(not isinstance(wait, CallWait) for state in _blocked(outcome) for wait in state.waits)


def _blocked(outcome: Outcome) -> list[RankState]:
    """Return the ranks that wait at the end of the run."""
    states = {} if outcome.evidence is None else outcome.evidence.ranks
    return [state for state in states.values() if state.phase is Phase.BLOCKED]
