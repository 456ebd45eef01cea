"""Orders of pipes between processes, and of the ends of processes.

In an exploration, two who send to one end of a pipe are ordered, and two who receive from it. A message is not ordered
with the receives before it.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from distsim.sim.isolation.process import require_task
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.steps import Access, Objects
from distsim.sim.kernel.turns import Moment, TurnRequest, always, asking_line, meet_clock, name_of, start

if TYPE_CHECKING:
    from distsim.debug.records import HostWait, Wait
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.kernel.scheduler import Event
    from distsim.sim.kernel.turns import TurnQueue


def take_turn(
    task: RankTask,
    label: str,
    objects: Objects,
    why: Wait | None = None,
    is_possible: Callable[[], bool] = always,
    released: Callable[[], Clock] = start,
) -> Moment:
    """In an exploration, wait for the turn of an operation, unless torch makes it. Return when it was."""
    turns, caller = task.port.facts.turns, asking_line(sys._getframe(1))
    step = None
    if turns is not None and caller is not None:
        operation = TurnRequest(label, caller.line, objects, is_possible, released=released, is_look=label == "done")
        step = turns.ask(task, operation, why, None, explicit=False)
    return None if step is None else step.index, task.clock


class PipeEnd:
    """What has happened at one end of a pipe. *task* makes the pipe."""

    def __init__(self, task: RankTask) -> None:
        turns = task.port.facts.turns
        name = id(self) if turns is None else (name_of(task), turns.number("pipe", name_of(task)))
        self.senders: Hashable = ("sent", name)
        """The object that those write who send to this end."""
        self.receivers: Hashable = ("taken", name)
        """The object that those write who receive from it."""
        self.openness: Hashable = ("open", name)
        """The object that tells whether a process has it open."""
        self.sent: deque[Moment] = deque()
        """When the messages were sent that it holds."""
        self.closings: list[Moment] = []
        """When processes have closed it."""


class Waitable:
    """An object that `multiprocessing.connection.wait` accepts."""

    _waiting: list[Event]
    """Events of those who wait for it."""

    def ready(self) -> bool:
        """Return whether data are available, or none can arrive any more."""
        raise NotImplementedError

    def signs(self) -> list[Event]:
        """Return the events that may make it ready."""
        self._waiting.append(require_task().port.event())
        return self._waiting[-1:]

    def wake(self) -> None:
        """Wake those who wait for it, because it may be ready."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            if not event.triggered:
                event.succeed()

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
        accesses = {name: access for item in objects for name, access in item.objects().items()}
        request = TurnRequest(label, caller.line, accesses, is_look=timeout is not None and timeout <= 0)
        if not request.is_look:
            request.is_possible = lambda: any(item.ready() for item in objects)
            request.enablers = lambda: _makers([item for item in objects if item.ready()])
        turns.ask(task, request, why, timeout or None, bool(timeout))
        return
    give_up_s = None if timeout is None else task.now_s() + timeout
    while not any(item.ready() for item in objects):
        left_s = None if give_up_s is None else give_up_s - task.now_s()
        if left_s is not None and left_s <= 0:
            if timeout == 0:
                task.poll(why)
            return
        sign = task.port.any_of([event for item in objects for event in item.signs()])
        if not task.wait_until(sign, why, left_s):
            return
    if turns is not None:
        meet_clock(task, functools.reduce(joined, (item.clock() for item in objects if item.ready()), START))


def _makers(ready: Sequence[Waitable]) -> frozenset[int]:
    """Return the steps that cannot come after a wait for one of several, of which some are *ready*: those of the only
    one.
    """
    moments = ready[0].moments() if len(ready) == 1 else []
    return frozenset(step for step, _ in moments if step is not None)


def end_of(process: SimProcess) -> Hashable:
    """Return the name of the end of a process that another one has started."""
    assert process.main_task is not None
    return "end", name_of(process.main_task)


def take_turn_to_end(turns: TurnQueue, task: RankTask) -> None:
    """Wait until the process of *task* may end, if another process can notice that."""
    process = task.process
    pipes = [pipe for pipe in process.notes.pipes if pipe.is_open_in(process)]
    objects: dict[Hashable, Access] = dict.fromkeys(process.groups.served, Access.WRITE)
    if process.family.parent is not None:
        objects[end_of(process)] = Access.WRITE
    objects |= {pipe.order.openness: Access.ADD for pipe in pipes}
    if not objects or process.ending.moments:
        return
    label = "ends, and with it its store" if process.groups.served else "ends"
    step = turns.ask(task, TurnRequest(label, "", objects), None, None, explicit=False)
    process.ending.moments = [(None if step is None else step.index, task.clock)]
    for pipe in pipes:
        pipe.order.closings += process.ending.moments
