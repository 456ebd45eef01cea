"""The pytest marker `ranks` as an importable name, and what holds in all orders.

Example:
    @ranks(4)
    def test_sum(rank):
        t = torch.tensor([float(rank)])
        dist.all_reduce(t)
        assert t.item() == 6
"""

from __future__ import annotations

import functools
import os
import sys
import unittest
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

__all__ = ["MultiProcContinuousTest", "MultiThreadedTestCase", "always", "ranks", "sometimes"]


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


class MultiThreadedTestCase(unittest.TestCase):
    """Replacement for the class of this name in `torch.testing`: each test runs on every simulated rank.

    A suite moves by its import line. `setUp` and `tearDown` run once for all ranks, `perThreadSetUp` and
    `perThreadTearDown` on each of them around a test. The attribute `explore` of a class, such as "all", runs its tests
    in every order of their operations. Needs pytest.
    """

    world_size: Any = 2
    """Number of ranks: an int, or a property."""
    explore: ClassVar[str | int | None] = None
    faults_explored: ClassVar[Sequence[str]] = ()
    distsim_marker: ClassVar[pytest.Mark | None] = None
    """The marker of the class's tests. Marks of pytest's own would add up with those of its base classes."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        size: Any = cls.world_size
        if isinstance(size, property):
            size = getattr(cls.__new__(cls), "world_size")  # noqa: B009  # mypy takes the class attribute
        more = {} if cls.explore is None else {"explore": cls.explore, "faults_explored": cls.faults_explored}
        cls.distsim_marker = pytest.mark.ranks(size, backend=cls.backend_str() or "gloo", **more).mark
        for name, method in list(vars(cls).items()):
            if name.startswith("test") and callable(method):
                setattr(cls, name, _around_each_rank(method))

    @classmethod
    def backend_str(cls) -> str | None:
        """Return the backend of the default group; None for gloo."""
        return None

    @property
    def rank(self) -> int:
        """Return the rank on which the test runs.

        Raises:
            RuntimeError: No rank runs it: the suite was started without pytest.
        """
        if "RANK" not in os.environ:
            raise RuntimeError("expected a test on ranks: run it with pytest, which loads distsim's plugin")
        return int(os.environ["RANK"])

    @property
    def pg(self) -> Any:
        """Return the default group."""
        import torch.distributed

        return torch.distributed.group.WORLD

    def _spawn_threads(self) -> None:
        """Do nothing: ranks begin with the test."""

    _spawn_processes = _spawn_threads

    def perThreadSetUp(self) -> None:
        """Prepare the rank before a test."""

    def perThreadTearDown(self) -> None:
        """Clean up after a test on the rank."""

    def assertEqual(
        self,
        first: Any,
        second: Any,
        msg: Any = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        exact_dtype: bool = True,
    ) -> None:
        """Compare as torch's test classes do: tensors, and sequences and dicts of them, by `torch.testing`."""
        import torch

        if torch.is_tensor(first) or isinstance(first, list | tuple | dict):
            torch.testing.assert_close(
                first, second, atol=atol, rtol=rtol, equal_nan=True, check_dtype=exact_dtype, msg=msg
            )
        else:
            super().assertEqual(first, second, msg)  # noqa: PT009

    def assertEqualOnRank(self, first: Any, second: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Compare on one rank."""
        if self.rank == rank:
            self.assertEqual(first, second, msg)  # noqa: PT009

    def assertNotEqualOnRank(self, first: Any, second: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Compare on one rank."""
        if self.rank == rank:
            self.assertNotEqual(first, second, msg)  # noqa: PT009


class MultiProcContinuousTest(MultiThreadedTestCase):
    """Replacement for the class of this name in `torch.testing`: each test runs on every simulated rank."""


def _around_each_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test method with the preparation of its rank."""

    @functools.wraps(method)
    def run(self: MultiThreadedTestCase, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self.perThreadSetUp()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.perThreadTearDown()

    return run
