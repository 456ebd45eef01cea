"""The pytest marker `ranks` as an importable name, and what holds in all orders.

Example:
    @ranks(4)
    def test_sum(rank):
        t = torch.tensor([float(rank)])
        dist.all_reduce(t)
        assert t.item() == 6
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["always", "ranks", "sometimes"]


def ranks(n: int | Sequence[int], **arguments: Any) -> pytest.MarkDecorator:
    """Return the marker `pytest.mark.ranks`, which runs a test's body on every rank.

    Args:
        n: Number of ranks. A list makes one test of each number.
        **arguments: The other arguments of the marker, such as `on`, `cluster`, `mesh` and `faults`;
            `pytest --markers` lists them. A wrong argument fails the test when it runs.

    Returns:
        A decorator for a test function or class.
    """
    return pytest.mark.ranks(n, **arguments)


def always(condition: object, name: str) -> None:
    """Fail the test if *condition* is false in any order that is explored.

    Args:
        condition: What must hold here.
        name: What it means, for the report.

    Raises:
        AssertionError: It is false.
    """
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(f"not always: {name}")


def sometimes(condition: object, name: str) -> None:
    """Report at the end of an exploration if *condition* was true in none of its orders.

    A test that is to reach a rare state uses it to show that it does. Outside of an exploration it does nothing.

    Args:
        condition: What holds here in some orders.
        name: What it means, for the report.
    """
    task = sys.modules.get("distsim.sim.kernel.task")  # not imported by a test on gloo
    process = None if task is None else task.current_process()
    if process is not None and process.port.facts.turns is not None:
        met = process.port.facts.turns.trace.sometimes
        met[name] = met.get(name, False) or bool(condition)
