"""pytest-timeout and simulated tests: its signal, and its timer, which would end all of pytest.

Neither interrupts a rank at an arbitrary point. The running rank is left behind, the others continue as far as they
can, and only then does the test end, so that the report can name the rank that was waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from distsim.debug.records import Evidence, Phase
from distsim.sim.kernel.interrupts import Interrupts
from distsim.sim.world.conditions import Conditions

if TYPE_CHECKING:
    from distsim.sim.world import World

GRACE_S = 1.0
"""Seconds that the running rank has to return or to show activity."""
CALLS_S = 5.0
"""Seconds that the other ranks then have to reach their calls, while the rank left behind still uses a share of
Python's time.
"""
KILL_S = 20.0
"""Seconds after its timeout that a test has to end regularly."""
monotonic = time.monotonic


def _ends_tests(handler: Callable[..., Any]) -> bool:
    """Return whether *handler* is pytest-timeout's, or the one with which `set_timer` replaced it."""
    return getattr(handler, "__module__", None) in ("pytest_timeout", __name__)


def debugged() -> bool:
    """Return whether pytest-timeout's handlers let a test continue because it is being debugged."""
    module = sys.modules.get("pytest_timeout")
    return module is not None and bool(module.is_debugging())


class LastWord(Interrupts):
    """The signals of one run, delivered when the run has given up on a rank that does not return."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.over = False
        self.left_behind: int | None = None
        """The rank that was running when the signal came, and that did not return."""
        self.lives = False
        """Whether the rank has run operators since."""
        self._until_s: float | None = None
        self._ticks = 0
        self._patience_s = world.host_timeout_s

    def deliver(self) -> None:
        """Deliver pending signals. Called between two events, and repeatedly while a rank runs on."""
        for call in [call for call in self.pending if not _ends_tests(call[0])]:
            self.pending.remove(call)  # a ticker of the test's own: nobody is late
            call[0](*call[1])
        if not self.pending:
            return
        world, rank = self.world, self.world.running
        if self.left_behind is not None and not self.over:
            world.host_timeout_s = self._patience_s
        elif self.over or rank is None or debugged():
            self._until_s = None  # whoever returns has ended nothing
            super().deliver()
        elif self._until_s is None:
            self._until_s, self._ticks = monotonic() + GRACE_S, world.ticks
        elif monotonic() > self._until_s:
            assert world.limits is not None
            self.lives = world.ticks != self._ticks or world.in_operator
            self.left_behind = rank.process.rank
            world.host_timeout_s = 0.0  # so the scheduler takes it for stuck, at its next look
            world.limits.start()
            world.limits.wall_time_s = CALLS_S

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals as usual, and deliver the last one at the end, in whichever thread runs the tests."""
        with super().deferred():
            try:
                yield
            finally:
                self.over = True
        self.deliver()


class TimedConditions(Conditions):
    """Conditions of a run whose timeout pytest-timeout decides."""

    last_word: LastWord | None = None

    def begin(self, world: World) -> None:
        """Begin the run, and route its interrupts through this module."""
        super().begin(world)
        world.interrupts = self.last_word = LastWord(world)

    @property
    def seen(self) -> Evidence | None:
        """Return where every rank was; a rank that computed was late and not stuck."""
        last = self.last_word
        if last is not None and last.lives and self.evidence is not None:
            for rank, state in self.evidence.ranks.items():
                if rank == last.left_behind:
                    state.phase = Phase.RUNNING
        return self.evidence


def set_timer(item: pytest.Item, settings: Any) -> bool:
    """Start a timer in place of pytest-timeout's `thread` method, which would end pytest itself.

    While ranks are being simulated, the timer first asks them to end, and their report becomes the test's failure.
    """
    import pytest_timeout  # type: ignore[import-untyped,unused-ignore]

    def fail() -> None:
        pytest.fail(pytest_timeout.PYTEST_FAILURE_MESSAGE % settings.timeout)

    def expire() -> None:
        if not settings.disable_debugger_detection and pytest_timeout.is_debugging():
            return
        last = getattr(getattr(item, "distsim_conditions", None), "last_word", None)
        if last is not None and not last.over:
            last.pending.append((fail, ()))
            if ended.wait(KILL_S):
                return
        pytest_timeout.timeout_timer(item, settings)

    def cancel() -> None:
        ended.set()
        timer.cancel()
        timer.join()

    ended = threading.Event()
    timer = threading.Timer(settings.timeout, expire)
    timer.name = f"pytest_timeout {item.nodeid}"
    vars(item)["cancel_timeout"] = cancel
    timer.start()
    return True
