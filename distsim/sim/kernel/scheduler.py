"""The scheduler: virtual time, deadlines, the baton, and the moment nothing moves."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from distsim.debug.records import CallWait, Wait
from distsim.sim.kernel.baton import Baton, OneCore, PollEvent, disk_reads, own_s
from distsim.sim.kernel.interrupts import Interrupts
from distsim.watchdog import shared_state

if TYPE_CHECKING:
    from distsim.sim.kernel.limits import Limits

Clock = simpy.Environment
"""Virtual time of one simulation, in seconds."""
Event = simpy.Event
"""What a task can wait for. It happens once: by `succeed`, or by itself if it is a timer."""


class Due(Protocol):
    """An action at a deadline, on the scheduler's side."""

    @property
    def explicit(self) -> bool:
        """Return whether the program set the limit. Such a deadline also passes when nothing else can happen."""
        ...

    @property
    def over(self) -> bool:
        """Return whether the event is no longer needed. Called before time passes for it, and never again."""
        ...

    def strike(self) -> None:
        """Run the action now."""
        ...


Deadline = tuple[float, int, Due]
"""Virtual time in seconds, order among equal times, and the action to run."""


class Deadlines:
    """Pending deadlines, kept out of simpy's heap because a pending timeout must not hide a deadlock."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._count = itertools.count()

    def add(self, at_s: float, due: Due) -> None:
        heapq.heappush(self._heap, (at_s, next(self._count), due))

    def next(self) -> Deadline | None:
        """Return the earliest deadline that is still needed."""
        heap = self._heap
        while heap and heap[0][2].over:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def take(self) -> Deadline:
        """Remove and return the earliest deadline."""
        return heapq.heappop(self._heap)

    def take_explicit(self) -> Deadline | None:
        """Remove and return the earliest deadline that the program set itself; used when nothing else can happen."""
        coming = [deadline for deadline in self._heap if not deadline[2].over]
        explicit = min((deadline for deadline in coming if deadline[2].explicit), default=None)
        if explicit is not None:
            coming.remove(explicit)
        heapq.heapify(coming)
        self._heap = coming
        return explicit


def has_happened(event: Event) -> bool:
    """Return whether *event* was made to happen; a timer counts as such only through its own time."""
    return event.triggered and not isinstance(event, simpy.Timeout)  # which is triggered from the first


# -- The scheduler: virtual time, deadlines, the baton, and the moment nothing moves.
#
# Read this first: `run` is all of it. simpy owns the clock; each thread of the user's program is a simpy
# process (task.py); a deadlock is an empty event heap with tasks still blocked. What tasks belong to, and
# what is said of a job that stands still, is the business of who inherits this (world.py).

QUIET_LIMIT_S = 3_600.0
"""A world in which ranks only poll for this long (virtual) is a deadlock."""

_real_monotonic = time.monotonic


class Expired(Exception):
    """Wakes a thread whose wait has reached its time limit; it does not leave `Task.wait_until`."""


class Unwind(BaseException):
    """Raised in a rank's thread to end it when the simulation is over. A program that catches it gets it again."""


@dataclass(slots=True)
class BatonRequest:
    """Request of a thread to the scheduler when it returns the baton."""

    event: simpy.Event | None
    why: Wait | None
    timeout_s: float | None = None
    explicit_timeout: bool = False
    """Whether the program set the limit. It then ends the wait when nothing else can happen any more."""
    poll: bool = False
    quiet: bool = False
    """Whether the task only polls, so that the end of its sleep counts as no progress."""


class Arrives(Protocol):
    """A call of a rank that the world has not seen yet."""

    def arrive(self) -> None:
        """Let the call meet those of the other members. Called on the scheduler's side."""
        ...


MAX_SLICES = 20_000
"""Maximum number of operator slices per rank in a trace."""


@dataclass(slots=True)
class HostTimes:
    """Virtual seconds of a process on its host: computing, in communication, and waiting for other ranks."""

    exposed_s: float = 0.0
    """Communication that no computation hides."""
    idle_s: float = 0.0
    """Waiting for ranks that have not made the call yet, and for anything else."""
    compute_s: float = 0.0
    slices: list[tuple[float, float, str]] = field(default_factory=list)
    """CPU operators for a trace, as (begin, end, name)."""
    step_ends: dict[int, list[float]] = field(default_factory=dict)
    """For a trace: the ends of the steps of each optimizer on the CPU, by the optimizer's id."""

    def account_wait(self, why: Wait | None, since_s: float, until_s: float) -> None:
        """Split a wait into communication that nothing hides (exposed) and waiting for other ranks (idle)."""
        if isinstance(why, CallWait):
            started = why.record.started_s
            moving = since_s if started is None else min(max(started, since_s), until_s)
            if started is None:
                moving = until_s
            ended = until_s if why.record.completed_s is None else max(moving, min(until_s, why.record.completed_s))
            self.idle_s += moving - since_s + until_s - ended  # after it: its GPU's kernels
            self.exposed_s += ended - moving
        else:
            self.idle_s += until_s - since_s

    def add_slice(self, start_s: float, seconds: float, name: str) -> None:
        """Record for a trace that an operator took *seconds*."""
        slices = self.slices
        if slices and slices[-1][2] == name and start_s - slices[-1][1] < 1e-9:
            slices[-1] = (slices[-1][0], start_s + seconds, name)
        elif len(slices) < MAX_SLICES:
            slices.append((start_s, start_s + seconds, name))


class Swapped(Protocol):
    """State of a process that is loaded while its tasks run."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def follow(self, other: Any) -> None:
        """Switch from the state *other*, like `other.leave()` and `enter()`."""
        ...


class TaskOwner(Protocol):
    """Owner of tasks: a simulated process."""

    rank: int
    main_task: Any
    thaw: simpy.Event | None
    """Event for which the process waits while it is stopped; None while it runs."""
    signals: Any
    """Signal handlers: those that are `due`, and `call_handlers`."""
    completions: Any
    """Callbacks of futures: those that are `due`, and `carry_out`."""
    tasks: Any

    @property
    def times(self) -> HostTimes: ...

    @property
    def interpreter(self) -> Swapped: ...


class Runs(Protocol):
    """Interface of a task (task.Task) for its scheduler."""

    request: BatonRequest | None
    doom: Unwind | None
    abandoned: bool
    native: int
    cores: frozenset[int] | None

    def interrupt(self, cause: BaseException) -> None: ...

    def raise_inside(self, unwind: type[Unwind]) -> None: ...

    def part(self) -> bool: ...

    def programs_work(self) -> int: ...


class TakesTurns(Protocol):
    """The operations of an exploration that wait for their turn (turns.TurnQueue)."""

    @property
    def is_over(self) -> bool:
        """Return whether the run is to end here."""
        ...

    def reads_clock(self) -> None:
        """Note that the running task reads a clock."""
        ...

    def advance(self) -> bool:
        """Let one operation go; return False if none is possible."""
        ...


class WaitLimit:
    """Raised in *task* when the wait of *request* times out."""

    __slots__ = ("_request", "_scheduler", "_task", "explicit", "over")

    def __init__(self, scheduler: Scheduler, task: Runs, request: BatonRequest) -> None:
        self._scheduler = scheduler
        self._task = task
        self._request = request
        self.explicit = request.explicit_timeout
        self.over = False

    def strike(self) -> None:
        if self._task.request is self._request:
            self._scheduler.timed_out(self._request.why)
            self._task.interrupt(Expired())


class Scheduler:
    """Runs tasks in virtual time, one at a time."""

    def __init__(
        self,
        env: simpy.Environment,
        host_timeout_s: float,
        patience: float,
        limits: Limits | None,
        on_progress: Callable[[Any], None] | None,
    ) -> None:
        self.env = env
        self.host_timeout_s = host_timeout_s
        self.patience = patience
        """Factor on *host_timeout_s* for a rank that computes between two calls."""
        self.current: TaskOwner | None = None
        self.running: Any = None
        """The task that has the baton."""
        self.shared_state = shared_state.here()
        """Shared memory in which the watchdog process sees which rank runs; None without a watchdog."""
        self.baton = Baton()
        self.core = OneCore()
        """Core on which the threads run, within `with`."""
        self.ticks = 0
        """Counts signs of life of the running thread: operators, calls, module loads."""
        self.in_operator = False
        self.events = 0
        self.live_tasks = 0
        self.interrupted = False
        """Ctrl-C was pressed."""
        self.crash: BaseException | None = None
        """Exception that must end the simulation at once: a user's mistake, or an error of distsim."""
        self.is_enough = False
        """Whether everything requested has been simulated, so that the run may end."""
        self.has_failed = False
        """Whether calls met that contradict each other, or a guard found a fault, so that the run is over."""
        self.stuck: Any = None
        """A task that never gave the baton back."""
        self.interrupts = Interrupts()
        self.limits = limits
        self.turns: TakesTurns | None = None
        """Operations that wait for a chooser; None if their order is that of virtual time."""
        self.on_progress = on_progress
        self.asleep = False
        self._pollers: list[PollEvent] = []
        self._quiet_s = 0.0
        self._last_ticks, self._last_tick_s, self._last_tick_event = -1, 0.0, 0
        self._deadlines = Deadlines()
        self._tasks_made = 0
        self._next_progress_s = 0.0

    # -- what the job answers

    def process_ended(self, process: Any) -> None:
        """Handle the end of the main task of *process*."""
        raise NotImplementedError

    def timed_out(self, why: Wait | None) -> None:
        """Handle a wait that times out while other tasks still run."""
        raise NotImplementedError

    def stands_still(self) -> None:
        """Handle a state in which no task can run any more."""
        raise NotImplementedError

    def failed(self) -> None:
        """Handle the end of a run in which something `has_failed`."""
        raise NotImplementedError

    def die(self, process: Any) -> None:
        """End *process*, whose thread is running, as SIGKILL does."""
        raise NotImplementedError

    def give_up(self, task: Any) -> None:
        """Handle a *task* that spins or blocks on the host."""
        raise NotImplementedError

    def all_ended(self) -> None:
        """Handle the end of all tasks."""
        raise NotImplementedError

    # -- the baton

    def next_task_number(self) -> int:
        self._tasks_made += 1
        return self._tasks_made

    def enter(self, process: TaskOwner) -> None:
        current = self.current
        if current is not process:
            if current is None:
                process.interpreter.enter()
            else:
                process.interpreter.follow(current.interpreter)
            self.current = process

    def leave(self) -> None:
        if self.current is not None:
            self.current.interpreter.leave()
            self.current = None

    def let_run(self, task: Runs, give: Callable[[], object]) -> None:
        """Give *task* the baton, wait until the task returns it, and check that this does not take too long."""
        self.running = task
        if task.cores is not self.core.cores:
            self.core.bind(task)
        give()
        if not self.baton.wait_for(0.25):
            self._watch(task)
        self.running = None

    def _watch(self, task: Runs) -> None:
        """Watch a running task by two limits of wall time.

        The first is for a task without any activity (operators, imports, work of a program that it started, reads that
        a disk serves), the second, longer unless the user set it, for a task without a call: a loop of operators that
        waits for a condition is active, too. Time in which other programs keep the thread from running does not count.
        """
        ticks, work, begun = self.ticks, (task.programs_work(), disk_reads(task.native)), own_s(task.native)
        since = begun
        while not self.baton.wait_for(0.1):
            if self.shared_state is not None:
                self.shared_state.beat()
            self.core.look()
            if task.cores is not self.core.cores:
                self.core.bind(task)
            limit_s = 2.0 if task.doom is not None else self.host_timeout_s  # a debugger lifts it meanwhile
            if self.interrupts.pending and task.doom is None:
                try:
                    self.interrupts.deliver()
                except BaseException as error:
                    self.crash = error  # simpy would keep it until it had been every other rank's turn
                    raise
            self._report_progress()
            if self.interrupted and task.doom is None:
                raise KeyboardInterrupt
            if task.doom is None and (self.ticks != ticks or self.in_operator):
                ticks, since = self.ticks, own_s(task.native)
            work_now = task.programs_work(), disk_reads(task.native)
            if task.doom is None and work_now != work:
                work, since = work_now, own_s(task.native)
            over = self.limits is not None and task.doom is None and self.limits.wall_over()
            now = own_s(task.native)
            if over or now - since > limit_s or now - begun > limit_s * self.patience:
                if not task.part():  # it ends at this very moment
                    self.baton.wait()
                    return
                task.abandoned = True
                self.core.release(task)
                if self.shared_state is not None:
                    self.shared_state.leave_threads_behind()
                if task.doom is None:
                    self.stuck = task
                else:
                    task.raise_inside(Unwind)
                return

    def lift_limits(self) -> None:
        """Lift the limits of wall time, while a rank is at the prompt of a debugger."""
        self.host_timeout_s = float("inf")
        if self.limits is not None:
            self.limits.wall_time_s = None

    # -- time: all that the rest of the simulator knows of simpy

    @property
    def now_s(self) -> float:
        """Return the virtual time in seconds."""
        return float(self.env.now)

    @property
    def next_event_s(self) -> float:
        """Return the virtual time of the next event; infinity if nothing is going to happen."""
        return float(self.env.peek())

    def event(self) -> Event:
        """Return an event that happens when somebody calls its `succeed`."""
        return self.env.event()

    def timer(self, seconds: float) -> Event:
        """Return an event that happens in *seconds* of virtual time."""
        return self.env.timeout(seconds)

    def any_of(self, events: Sequence[Event]) -> Event:
        """Return an event that happens with the first of *events*."""
        return self.env.any_of(events)

    def in_background(self, steps: Generator[Event, Any, None]) -> None:
        """Run *steps*, which yield the event before each next step, beside the tasks."""
        self.env.process(steps)

    def step(self) -> None:
        """Let the next event happen."""
        self.env.step()

    def limit_wait(self, task: Runs, request: BatonRequest) -> WaitLimit:
        """End the wait that *request* asks for when its time is over."""
        assert request.timeout_s is not None
        limit = WaitLimit(self, task, request)
        self.at_deadline(float(self.env.now) + request.timeout_s, limit)
        return limit

    def at_deadline(self, at_s: float, due: Due) -> None:
        """Run *due* at *at_s*, unless it is no longer needed then."""
        self._deadlines.add(at_s, due)

    def _expire(self, deadline: Deadline) -> None:
        """Let time pass up to *deadline*, which is removed from the pending ones."""
        at_s, _, due = deadline
        alarm = self.env.timeout(max(0.0, at_s - float(self.env.now)))
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: due.strike())

    def poll_event(self, quiet_polls: int) -> PollEvent:
        event = PollEvent(self.env)
        self._pollers.append(event)
        return event

    def _wake_pollers(self) -> None:
        waiting, self._pollers = self._pollers, []
        for event in waiting:
            event.succeed()

    # -- the run

    def run(self) -> None:
        """Run until every task has ended, the job has reason to stop, or nothing can move any more."""
        env, queue = self.env, self.env._queue
        while self.live_tasks:
            if self.interrupts.pending:
                self.interrupts.deliver()
            upcoming = queue[0][0] if queue else float("inf")
            if self.turns is not None and upcoming == float("inf") and self.turns.advance():
                if self.turns.is_over:
                    return
                continue
            if self._pollers and self._poll_turn(upcoming):
                continue
            deadline = self._deadlines.next()
            if upcoming == float("inf"):
                explicit = self._deadlines.take_explicit()
                if explicit is None:  # an empty heap, and tasks that are blocked: a deadlock
                    self.stands_still()
                    return
                self._expire(explicit)
                continue
            if deadline is not None and deadline[0] < upcoming and self.turns is None:
                self._expire(self._deadlines.take())
                continue
            is_poll = isinstance(queue[0][3], PollEvent)
            env.step()
            self.events += 1
            self.core.look()
            if self.crash is not None:
                raise self.crash
            if self.interrupted:
                raise KeyboardInterrupt
            if not is_poll:
                self._quiet_s = 0.0
                if self._pollers:
                    self._wake_pollers()
            if not self.events & 255:
                self._report_progress()
                if self._only_sleeps():
                    self.stands_still()
                    return
            if self.is_enough:
                return
            if self.has_failed:
                self.failed()
                return
            if self.stuck is not None:
                stuck, self.stuck = self.stuck, None
                self.give_up(stuck)
            if self.limits is not None and self.limits.over(float(env.now), self.events):
                self.stands_still()
                return
        self.all_ended()

    def _only_sleeps(self) -> bool:
        """Return whether for an hour of virtual time the tasks only slept or polled a store (`while not ready:
        sleep(1)`).
        """
        now_s = float(self.env.now)
        if self.ticks != self._last_ticks:
            self._last_ticks, self._last_tick_s, self._last_tick_event = self.ticks, now_s, self.events
        self.asleep = now_s - self._last_tick_s > QUIET_LIMIT_S and self.events - self._last_tick_event > 10_000
        return self.asleep

    @property
    def quiet_s(self) -> float:
        """Return for how much virtual time only polling has happened."""
        return self._quiet_s

    @property
    def only_polls(self) -> bool:
        """Return whether for the last virtual second the threads only polled."""
        return self._quiet_s > 1.0

    def _poll_turn(self, upcoming: float) -> bool:
        """Return whether some threads poll and no other event is near, so that time should advance in growing steps."""
        step_s = max(1e-6, 0.1 * self._quiet_s)
        if upcoming - float(self.env.now) <= step_s:
            return False
        deadline = self._deadlines.next()
        if deadline is not None and deadline[0] <= float(self.env.now) + step_s:
            return False
        if self._quiet_s > QUIET_LIMIT_S and upcoming == float("inf"):
            self._pollers.clear()
            return False
        quiet_s = self._quiet_s + step_s
        alarm = PollEvent(self.env)
        alarm._ok, alarm._value = True, None
        self.env.schedule(alarm, delay=step_s)
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._wake_pollers())
        self._quiet_s = quiet_s
        self.env.step()
        self.events += 1
        return True

    def _report_progress(self) -> None:
        if self.on_progress is not None:
            now = _real_monotonic()
            if now >= self._next_progress_s:
                self._next_progress_s = now + 0.2
                self.on_progress(self)
