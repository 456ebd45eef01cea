"""Waits for the first of several things: messages through pipes, items of queues, ends of processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Sequence

from distsim.debug.records import HostWait
from distsim.sim.isolation.process import require_task
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.scheduler import Event
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.turns import Moment, TurnRequest, asking_line, meet_clock


class Waitable:
    """An object that `multiprocessing.connection.wait` accepts."""

    def ready(self) -> bool:
        """Return whether data are available, or none can arrive any more."""
        raise NotImplementedError

    def signs(self) -> list[Event]:
        """Return the events that may make it ready."""
        raise NotImplementedError

    # -- in an exploration

    def objects(self) -> dict[Hashable, Access]:
        """Return what decides whether it is ready."""
        raise NotImplementedError

    def moments(self) -> list[Moment]:
        """Return when it was made ready."""
        raise NotImplementedError

    def clock(self) -> Clock:
        """Return the clock of what has made it ready."""
        return functools.reduce(joined, (clock for _, clock in self.moments()), START)


def wait_for_any(
    objects: Sequence[Waitable], timeout: float | None, why: HostWait, label: str = "wait for several"
) -> None:
    """Wait until one of *objects* is ready or *timeout* seconds have passed.

    In an exploration that has an order, except for a wait for one object without a limit.
    """
    task = require_task()
    turns, caller = task.port.facts.turns, None
    if turns is not None and (timeout is not None or len(objects) > 1):
        caller = asking_line(sys._getframe(1))
    if turns is not None and caller is not None:
        turns.ask(task, _wait_operation(objects, timeout, label, caller.line), why, timeout or None, bool(timeout))
        return
    give_up_s = None if timeout is None else task.now_s() + timeout
    while not any(item.ready() for item in objects):
        left_s = None if give_up_s is None else give_up_s - task.now_s()
        if left_s is not None and left_s <= 0:
            task.poll(why)
            return
        sign = task.port.any_of([event for item in objects for event in item.signs()])
        if not task.wait_until(sign, why, left_s):
            return
    if turns is not None:
        meet_clock(task, functools.reduce(joined, (item.clock() for item in objects if item.ready()), START))


def _wait_operation(objects: Sequence[Waitable], timeout: float | None, label: str, line: str) -> TurnRequest:
    """Return a wait as an operation. What has made the only one ready cannot come after it."""

    def enablers() -> frozenset[int]:
        ready = [item for item in objects if item.ready()]
        moments = ready[0].moments() if len(ready) == 1 else []
        return frozenset(step for step, _ in moments if step is not None)

    accesses = {name: access for item in objects for name, access in item.objects().items()}
    if timeout is not None and timeout <= 0:
        return TurnRequest(label, line, accesses, is_look=True)
    return TurnRequest(label, line, accesses, lambda: any(item.ready() for item in objects), enablers)
