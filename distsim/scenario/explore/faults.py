"""Judges a run after a death or an early limit: ranks end, or fail with right data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.debug.records import CallWait, Phase

if TYPE_CHECKING:
    from distsim.sim.kernel.chooser import Orders
    from distsim.sim.outcome import Outcome


def is_right_under_fault(orders: Orders, outcome: Outcome) -> bool:
    """Return whether a run in which a rank dies or a limit strikes early ended as it should."""
    disturbed = orders.death is not None or any(step.offer.id.endswith("!") for step in orders.trace.steps)
    return disturbed and not is_unsafe(outcome)


def is_unsafe(outcome: Outcome) -> bool:
    """Return whether a rank fails an assertion, or waits for ever, after another one has died or a limit has struck.

    A call of a group has a timeout, so that it ends; a wait for a key, a lock or a thread may have none.
    """
    wrong = any(failure.type == "AssertionError" for failure in outcome.failures)
    states = {} if outcome.evidence is None else outcome.evidence.ranks
    blocked = [state for state in states.values() if state.phase is Phase.BLOCKED]
    return wrong or any(not isinstance(wait, CallWait) for state in blocked for wait in state.waits)
