"""Turns of operations: in an exploration each waits until a chooser lets it go."""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from distsim.debug.records.frames import STANDARD, Owner, is_ours, owner, shown
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.clocks import START, Clock, joined
from distsim.sim.kernel.steps import Access, Alternative, NextOperation, Objects, Step

if TYPE_CHECKING:
    from distsim.debug.records import Wait
    from distsim.sim.kernel.scheduler import Event
    from distsim.sim.kernel.task import Task

# -- A task that comes to an operation leaves it here and gives the baton back. The scheduler first lets everything else
# happen, until no event is left; then the chooser takes one of the operations that are possible. So virtual time orders
# nothing: neither a sleep nor a rank's speed does. All code between two turns belongs to the first of them.

MOST_LOOKS = 100
"""Looks in a row at something that does not change, after which a loop counts as waiting for it."""
MOST_EXPIRIES = 2
"""Times that the limit of one line's wait strikes before the event comes: a loop that waits again has no last one."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The line of the program that asks for an operation."""

    line: str
    """`file.py:12`."""
    arguments: dict[str, Any]
    """Arguments of the method that the program called, by name."""


_LOCKING = (threading.__file__, queue.__file__, contextlib.__file__)
"""Files of the standard library whose locks are the program's own."""


def locking_line(frame: FrameType | None) -> Caller | None:
    """Return the line of the program that takes a lock; None for the locks of torch and of the standard library.

    The library's own, of an executor or of logging, may be taken while it holds a lock that is not simulated.
    """
    return asking_line(frame, _LOCKING)


def asking_line(frame: FrameType | None, through: tuple[str, ...] = ()) -> Caller | None:
    """Return the line of the program that called into distsim or the standard library; None if torch called.

    torch's own use of stores and locks follows its own protocols, whose order is immaterial, and so is that of the
    locks that `threading.Thread` makes for itself. A thread may have a function of the standard library as its target.
    """
    below = frame
    target = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_ours(file):
            below = frame
        elif file.startswith("<"):  # generated, as a dataclass's `__init__` is, unless nothing else called
            target = f"{file}:{frame.f_lineno}"
        elif file == threading.__file__ and frame.f_code.co_name == "run":
            target = "a thread"
        elif through and file.startswith(STANDARD) and "site-packages" not in file and file not in through:
            return None
        elif not file.startswith(STANDARD) or "site-packages" in file:
            if "/torch/cuda/" in file or "/torch/futures/" in file:  # which the program asks through torch
                frame = frame.f_back
                continue
            if owner(file) is Owner.MACHINERY:
                return None
            assert below is not None
            return Caller(f"{shown(file)}:{frame.f_lineno}", dict(below.f_locals))
        frame = frame.f_back
    return Caller(target, {}) if target else None


def always() -> bool:
    """Return True: the operation is possible at any time."""
    return True


def nothing() -> frozenset[int]:
    """Return no steps."""
    return frozenset()


def start() -> Clock:
    """Return the clock of the beginning."""
    return START


@dataclass(slots=True)
class TurnRequest:
    """What a task is about to do."""

    label: str
    line: str
    objects: Objects
    is_possible: Callable[[], bool] = always
    enablers: Callable[[], frozenset[int]] = nothing
    """Numbers of the steps that made it possible."""
    released: Callable[[], Clock] = start
    """Clock of what made it possible without being a step."""
    is_question: bool = False
    """Whether it may also go, with the answer "not yet", before it is possible."""
    is_look: bool = False
    """Whether it only reads, so that a loop may repeat it."""


@dataclass(slots=True)
class _Asked:
    task: Task
    operation: TurnRequest
    event: Event
    name: str
    limit_s: float | None
    """Limit that the program set for the wait, in seconds; None without one."""
    clock: Clock
    seen: int | None
    """For a look that repeats the task's last one: the last change that that one saw."""
    looks: int = 0
    """How often in a row it has been repeated without a change."""


@dataclass(slots=True)
class _Look:
    key: tuple[Any, ...]
    change: int
    count: int


Moment = tuple[int | None, Clock]
"""The step of an operation, None without one, and the clock after it."""


class MatchSource(Protocol):
    """Where receives from any source wait for one of several messages (c10d/mailbox.py)."""

    def offers(self) -> Iterator[tuple[NextOperation, Callable[[Step], None]]]:
        """Yield each match that may be next, and the action that makes it."""
        ...

    def close(self, orders: Orders) -> None:
        """Add the alternatives of its matches to the trace of a run that has ended."""
        ...


def name_of(task: Task) -> str:
    """Return the name of a task, which is the same in all runs: `1.0` is the main thread of rank 1.

    `p1.0#2#0` is the main thread of the second process that this thread has started.
    """
    if not task.label:
        process: Any = task.process
        number = process.tasks.index(task) if task in process.tasks else 0
        if process.family.label:
            task.label = f"{process.family.label}#{number}"
        else:
            task.label = f"{process.rank}.{number}" if process.is_rank else f"p{process.index}.{number}"
    return task.label


def order_of(name: str) -> tuple[int, ...]:
    """Return the position of a task's operations among others; those of a remote call come after those of threads."""
    first, *others = map(int, re.findall(r"\d+", name))
    if "@" in name:
        return (0, first, sys.maxsize, *others)
    return (int(name.startswith("p")), first, *others)


class TurnQueue:
    """The operations of one run that wait for their turn."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.trace = orders.trace
        self.sources: dict[MatchSource, None] = {}
        self._requests: dict[str, _Asked] = {}
        self._looks: dict[str, _Look] = {}
        self._expiries: dict[tuple[str, str], int] = {}
        """Limits that struck, by task and line."""
        self._numbers: dict[tuple[str, ...], int] = {}

    # -- in a task's own thread

    def ask(
        self, task: Task, operation: TurnRequest, why: Wait | None, timeout_s: float | None, explicit: bool
    ) -> Step | None:
        """Wait for the turn of *operation*; return its step, or None if the wait has reached its limit."""
        name = name_of(task)
        self.count_call(task)
        key = (operation.label, operation.line, tuple(operation.objects))
        last = self._looks.get(name) if operation.is_look else None
        seen, looks = (last.change, last.count) if last is not None and last.key == key else (None, 0)
        limit_s = timeout_s if explicit else None
        request = _Asked(task, operation, task.world.event(), name, limit_s, task.clock, seen, looks)
        self._requests[name] = request
        try:
            in_time = task.wait_until(request.event, why, timeout_s, explicit)
        finally:
            del self._requests[name]
        if not in_time:
            self._looks.pop(name, None)
            return None
        step: Step | None = request.event.value
        if step is None:  # its wait expires, as a choice
            task.sleep(timeout_s or 0.0)  # so that a loop which waits for the rest of a limit sees that it is over
            return None
        if operation.is_look:
            change = self.trace.last_change(operation.objects)
            count = looks + 1 if seen is not None and seen == change else 0
            self._looks[name] = _Look(key, change, count)
        else:
            self._looks.pop(name, None)
        return step

    def count_call(self, task: Task) -> None:
        """Count a call of a rank, before which a fault may strike it."""
        process: Any = task.process
        rank = process.rank
        if not process.is_rank or process.family.label:
            return
        number = self.trace.calls[rank] = self.trace.calls.get(rank, 0) + 1
        for strike in self.orders.strikes:
            if (strike.rank, strike.call) == (rank, number):
                if strike.kind == "kill":
                    task.world.die(process)
                self._lose_stores(task, process.port.shared)

    def _lose_stores(self, task: Task, shared: Any) -> None:
        """Close all stores, in a turn of its own."""
        stores = dict(shared.stores)
        if stores:
            request = TurnRequest("stores are lost", "", dict.fromkeys(stores, Access.WRITE))
            self.ask(task, request, None, None, explicit=False)
        for address, values in stores.items():
            shared.close_store(address, values)

    def number(self, *kind: str) -> int:
        """Return the number of the next object of a kind, from 1."""
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return number

    def answer(self, task: Task, label: str, is_so: Callable[[], bool], why: Wait | None) -> bool | None:
        """Return whether *is_so*, as the program asks at some moment: "not yet" is an order of its own.

        It is None if torch asks, whose own loops are no choice. A line gets "not yet" once; then it waits for the
        answer yes, or until nothing else can happen.
        """
        caller = asking_line(sys._getframe(1))
        if caller is None:
            return None
        question = TurnRequest(label, caller.line, {}, is_so, is_question=True)
        return self.ask(task, question, why, None, explicit=False) is not None

    def does(self, something: str, frame: FrameType | None = None) -> None:
        """Note *something* that the program does and whose order is not a choice, if the program itself does it.

        Args:
            something: What it does, for the result.
            frame: Who does it; None: the caller.
        """
        caller = asking_line(frame or sys._getframe(1))
        if caller is not None:
            self.trace.unexplored[f"{something} ({caller.line})"] = None

    def reads_clock(self) -> None:
        """Note that the program reads a clock, if it does so itself."""
        caller = asking_line(sys._getframe(1), through=("",))
        if caller is not None:
            self.trace.clocks[caller.line] = None

    # -- in the scheduler

    @property
    def is_over(self) -> bool:
        """Return whether the chooser has ended the run."""
        return self.trace.is_cut

    def advance(self) -> bool:
        """Let one operation go, now that nothing else can happen; return False if none is possible."""
        goes: dict[str, Callable[[Step], None]] = {}
        offers: list[NextOperation] = []
        ready = [request for request in self._requests.values() if request.operation.is_possible()]
        first = [request for request in ready if request.seen is None]
        for request in first:
            offers.append(self._offer(request))
            goes[request.name] = self._go(request)
        for source in self.sources:
            for offer, go in source.offers():
                offers.append(offer)
                goes[offer.id] = go
        if not offers:
            changed = [
                request for request in ready if self.trace.last_change(request.operation.objects) != request.seen
            ]
            for request in changed or [request for request in ready if request.looks < MOST_LOOKS]:
                self.trace.polls[request.operation.line] = None
                offers.append(self._offer(request, repeats=True))
                goes[request.name] = self._go(request)
        is_last = not offers
        for request in self._requests.values():
            if not (request.operation.is_question or self._may_expire(request)):
                continue
            if self._num_left(request, is_last) > 0:
                offers.append(self._expiry(request))
                goes[offers[-1].id] = self._expire(request)
            else:
                self._is_last(request)
        if not offers:
            return False
        step = self.trace.take(offers)
        if step is not None:
            goes[step.offer.id](step)
        return True

    def _offer(self, request: _Asked, repeats: bool = False) -> NextOperation:
        operation = request.operation
        return NextOperation(
            request.name,
            request.name,
            operation.objects,
            (0, *order_of(request.name)),
            operation.label,
            operation.line,
            request.clock,
            operation.enablers(),
            operation.released(),
            repeats,
        )

    def _may_expire(self, request: _Asked) -> bool:
        explores = self.orders.explores_timeouts and request.limit_s is not None
        return explores and not request.operation.is_possible()

    def _num_left(self, request: _Asked, is_last: bool = False) -> int:
        """Return how often a line's wait may still expire, or its question be answered by "not yet"."""
        most = MOST_LOOKS if is_last else 1 if request.operation.is_question else MOST_EXPIRIES
        return most - self._expiries.get((request.name, request.operation.line), 0)

    def _expiry(self, request: _Asked) -> NextOperation:
        operation = request.operation
        is_question = operation.is_question
        return NextOperation(
            request.name + ("?" if is_question else "!"),
            request.name,
            operation.objects,
            (2, *order_of(request.name)),
            f"{operation.label}: not yet" if is_question else f"times out: {operation.label}",
            operation.line,
            request.clock,
            expires=True,
        )

    def _go(self, request: _Asked) -> Callable[[Step], None]:
        def go(step: Step) -> None:
            if request.operation.is_question and self._num_left(request) > 0:
                self.trace.alternatives.append(Alternative(step.index, f"{request.name}?", request.clock))
            elif self.orders.explores_timeouts and request.limit_s is not None:
                self._could_expire(request, step)
            request.task.clock = step.clock
            request.event.succeed(step)

        return go

    def _could_expire(self, request: _Asked, step: Step) -> None:
        """Note that the wait which *step* ends could have expired before what ended it."""
        if self._num_left(request) <= 0:
            self._is_last(request)
            return
        for index in step.offer.enablers:
            if not self.trace.steps[index].precedes(request.clock):
                self.trace.alternatives.append(Alternative(index, f"{request.name}!", request.clock))

    def _is_last(self, request: _Asked) -> None:
        line = request.operation.line
        if request.operation.is_question:
            self.trace.polls[line] = None
            return
        self.trace.unexplored[f"waits again after its limit ({line}), which strikes {MOST_EXPIRIES} times"] = None

    def _expire(self, request: _Asked) -> Callable[[Step], None]:
        def expire(step: Step) -> None:
            key = request.name, request.operation.line
            self._expiries[key] = self._expiries.get(key, 0) + 1
            request.task.clock = step.clock
            request.event.succeed(None)

        return expire

    def close(self) -> None:
        """Record what tasks were about to do when the run ended, and what could have been instead of its matches."""
        if self.trace.is_cut:
            return
        self.trace.pending = [self._offer(request) for request in self._requests.values() if request.seen is None]
        for source in self.sources:
            source.close(self.orders)


def meet_clock(task: Task | None, clock: Clock) -> None:
    """Let *task* continue after what has *clock*."""
    if task is not None:
        task.clock = joined(task.clock, clock)
