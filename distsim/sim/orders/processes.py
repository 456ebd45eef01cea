"""Processes in an exploration: who uses a pipe first, and when others see that a process has ended, are choices.

Two who send to one end of a pipe are ordered, and two who receive from it. A message is not ordered with the receives
before it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from distsim.sim.kernel.clocks import Clock
from distsim.sim.kernel.steps import Access, Objects
from distsim.sim.kernel.turns import Moment, TurnRequest, always, asking_line, name_of, start

if TYPE_CHECKING:
    from distsim.debug.records import Wait
    from distsim.sim.isolation.process import RankTask, SimProcess
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
        operation = TurnRequest(label, caller.line, objects, is_possible, released=released)
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
