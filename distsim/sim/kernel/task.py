"""A task: one thread of the user's program, and the futures that its calls complete."""

from __future__ import annotations

import _thread
import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import simpy

from distsim.debug.records import CallWait, HostWait, Wait
from distsim.sim.kernel.baton import Baton, Nap, begin_thread
from distsim.sim.kernel.clocks import START, Clock
from distsim.sim.kernel.scheduler import Arrives, BatonRequest, Expired, Scheduler, TaskOwner, Unwind
from distsim.torch_compat.groups import FUTURE
from distsim.watchdog.shared_state import crash_stack_for_this_thread


def take_up_tracing() -> None:
    """Install tracing and profiling functions for new threads (coverage, a debugger, cProfile), as `threading.Thread`
    does. `sys.monitoring` sees all threads anyway."""
    trace, profile = threading.gettrace(), threading.getprofile()
    if trace is not None:
        sys.settrace(trace)
    if profile is not None:
        sys.setprofile(profile)


# -- A task: one thread of the user's program, and the baton that lets exactly one run.
#
# Every thread of a simulated rank is an OS thread (autograd and dispatch state are thread-local)
# paired with a simpy process. The thread runs until it needs something from the world; it then
# leaves a `BatonRequest` and gives the baton back to the scheduler, whose simpy process yields the
# event the thread waits for. So the order of everything is the order of simpy's event heap.

CLOCK_READ_S = 1e-7
"""Seconds of reading a clock from Python (timeit of time.perf_counter on a server CPU of the 2020s: 50 to 100 ns)."""

MANY_LOOKS = 1_000
"""A loop that has looked at one thing so often waits for it."""

SPIN_LIMIT_S = 3_600.0
"""Virtual time in seconds after which a loop that only reads the clock counts as waiting for something else."""
_STAMPED_BY = ("logging", "loguru._datetime")
"""Modules that read the clock to stamp a record, and do not wait for a time."""


def _is_stamp() -> bool:
    """Return whether the clock is read to stamp a record; `for_ranks` may stand between it and who reads it."""
    reader: Any = sys._getframe(3)
    return any(frame.f_globals.get("__name__") in _STAMPED_BY for frame in (reader, reader.f_back) if frame is not None)


_here = threading.local()


current_task: Callable[[], Task | None] = functools.partial(getattr, _here, "task", None)
"""Returns the task of the calling thread; None outside a simulation.

It is called at every switch, so it is written without a Python frame.
"""


def require_task() -> Task:
    """Return the task of the calling thread, for code that only makes sense inside a rank."""
    task = current_task()
    if task is None:
        raise RuntimeError("this call belongs inside a simulated rank")
    return task


def current_process() -> Any:
    """Return the process of the calling thread; None outside a simulation. `process.current_process` has the precise
    type."""
    task = current_task()
    return None if task is None else task.process


class Killed(Unwind):
    """Raised in a rank that died by `os._exit`, a signal or an injected crash, so that none of its cleanup runs."""


class SignalArrived(BaseException):
    """Wakes a process's main thread so that it calls its signal handlers; the thread then continues to wait."""


class _Taken(BaseException):
    """Exception that `stop_asking` raises and catches."""


class Task:
    """One simulated thread. Methods without an underscore are called in its own thread."""

    def programs_work(self) -> int:
        """Return how much work the real programs that it started have done, as a growing number; only for a rank's
        thread."""
        return 0

    def __init__(
        self,
        world: Scheduler,
        process: TaskOwner,
        body: Callable[[], Any],
        name: str,
        daemon: bool = False,
        at_once: bool = False,
    ):
        """Args:
        at_once: Whether it begins before all events of this instant.
        """
        self.world = world
        self.process = process
        self.name = name
        self.number = world.next_task_number()
        self.daemon = daemon
        self.ident: int | None = None
        self.native = 0
        """The operating system's number of the thread, once it runs."""
        self.cores: frozenset[int] | None = None  # where its thread may run: baton.py
        self.finished = False
        self.abandoned = False
        self._has_thread = False
        self.done: simpy.Event = world.env.event()
        self.debt_s = 0.0
        """Compute time this thread has used up and the world has not yet seen."""
        self.coming: tuple[float, Arrives] | None = None
        """A call that the world has not seen yet, and the compute time before it."""
        self.request: BatonRequest | None = None
        self.blocked_since_s: float | None = None
        self.quiet_polls = 0
        self._looked_at: object = None
        self._looks = 0
        self.time_queries = 0
        self.spinning_since_s = 0.0
        self.refusals = 0
        self.doom: Unwind | None = None
        self.label = ""
        """Its name in an exploration (turns.name_of)."""
        self.clock: Clock = START
        """In an exploration, what happens before its next operation."""
        self._body = body
        self._go = Baton()
        self._parting = _thread.allocate_lock()
        self._throw: BaseException | None = None
        self._driver: simpy.Process = world.env.process(self._drive(at_once))

    # -- in the thread itself

    def now_s(self) -> float:
        """Return virtual seconds since the simulation began, including computation of this thread not yet passed to
        the clock.
        """
        now_s: float = self.world.env._now  # past the property: asked at every operator
        return now_s + self.debt_s

    def compute(self, seconds: float) -> None:
        """Spend virtual time on the host without passing the baton on."""
        self.debt_s += seconds
        self.quiet_polls = 0
        self.time_queries = 0

    def arrive(self, call: Arrives) -> None:
        """Let *call* arrive when the world has caught up with this thread, which waits next. One hand-over replaces
        those of `flush`, the arrival and the wait."""
        if self.coming is not None:  # what a trace function or `__del__` calls before the thread came to wait
            self.flush()
        self.coming = (self.debt_s, call)

    def wait(self, event: simpy.Event, why: Wait) -> Any:
        """Sleep until *event* has happened and return its value."""
        self.wait_until(event, why, None)
        return event.value

    def wait_until(self, event: simpy.Event, why: Wait | None, timeout_s: float | None, explicit: bool = True) -> bool:
        """Sleep until *event* has happened or *timeout_s* of virtual time have passed, and return whether it has
        happened.

        *timeout_s* None means no limit. *explicit* says that the program set the limit; a default limit does not end
        a job that stands still.
        """
        self.quiet_polls = 0
        self.time_queries = 0
        try:
            self._hand_over(BatonRequest(event, why, timeout_s, explicit))
        except Expired:
            return False
        return True

    def flush(self, why: Wait | None = None) -> None:
        """Let the world catch up with the compute time of this thread."""
        if self.debt_s > 0.0 or self.coming is not None:
            self._hand_over(BatonRequest(None, why))
        elif self.doom is not None:
            raise self.doom

    def sleep(self, seconds: float) -> None:
        quiet, self.quiet_polls = self.quiet_polls, 0
        self.debt_s += max(0.0, seconds)
        if self is self.process.main_task:
            self.process.times.idle_s += max(0.0, seconds)
        self._hand_over(BatonRequest(None, HostWait("sleep"), quiet=quiet > 0))
        self.quiet_polls = quiet  # to nap between two looks changes nothing

    def looks_on(self, looked_at: object) -> bool:
        """Return whether it has looked at *looked_at* MANY_LOOKS times in a row: it waits for that."""
        self._looks = self._looks + 1 if self._looked_at is looked_at else 1
        self._looked_at = looked_at
        return self._looks > MANY_LOOKS

    def nap(self) -> None:
        """Sleep for a millisecond between two looks at one thing, and for up to a second after many of them."""
        self.quiet_polls += 1
        self.sleep(1e-3 * 1.01 ** min(694, max(0, self._looks - MANY_LOOKS)))

    def poll(self, why: Wait, waits: bool = False) -> None:
        """Run one iteration of a polling loop: return when something has happened.

        *waits* says that the task does nothing between its polls that others wait for.
        """
        self.quiet_polls += 1
        self.time_queries = 0
        quiet = waits or self.quiet_polls > 1
        self._hand_over(BatonRequest(self.world.poll_event(self.quiet_polls), why, poll=True, quiet=quiet))

    def time_query(self) -> float:
        """Let a little virtual time pass because the clock was read, so that a loop that only reads it makes
        progress.

        The steps grow with the loop, so that waiting for an hour in this way is cheap.
        """
        if self.world.turns is not None:
            self.world.turns.reads_clock()
        if self.time_queries == 0:
            self.spinning_since_s = self.now_s()
        self.time_queries += 1
        if self.time_queries > MANY_LOOKS and not _is_stamp():
            spun_s = self.now_s() - self.spinning_since_s
            if spun_s > SPIN_LIMIT_S:
                self._hand_over(BatonRequest(self.world.poll_event(1), HostWait("reading the clock"), poll=True))
            else:
                self.debt_s += 0.002 * spun_s
                self._hand_over(BatonRequest(None, None))
        self.debt_s += CLOCK_READ_S
        return self.now_s()

    def _hand_over(self, request: BatonRequest) -> None:
        if self.doom is not None or self.abandoned:
            self._refuse_to_go_on(self.doom or Unwind())
        if _here.task is not self:
            raise RuntimeError("a rank's thread used another thread's task")
        while True:
            self.request = request
            if self.world.baton.give() or self._go.waits():  # on one line: baton.py
                self._go.wait()
            self.request = None
            throw, self._throw = self._throw, None
            signals = self.process.signals.due and self is self.process.main_task
            if self.process.completions.due or signals:  # callbacks and handlers make calls of their own
                rest_s, self.debt_s = self.debt_s, 0.0
                coming, self.coming = self.coming, None
                self.process.completions.carry_out()
                if signals:
                    self.process.signals.call_handlers()
                self.debt_s += rest_s
                self.coming = coming
            if isinstance(throw, SignalArrived):
                continue  # as system calls do (PEP 475)
            if throw is not None:
                raise throw
            return

    def _refuse_to_go_on(self, doom: Unwind) -> None:
        """End the thread. If the program repeatedly swallows the exception, the thread is left asleep."""
        self.refusals += 1
        if self.refusals > 1_000:
            self.abandoned = True
            if self.part():
                self.world.baton.give_for_good()
            forever = _thread.allocate_lock()
            forever.acquire()
            forever.acquire()
        raise doom

    def _thread_main(self) -> None:
        _here.task = self
        self.ident, self.native = threading.get_ident(), _thread.get_native_id()  # the machine's, not the simulated one
        self._go.wait()
        if self.world.shared_state is not None:
            self.world.shared_state.runs_in(self.native)
            crash_stack_for_this_thread()
        try:
            if self.doom is None:
                take_up_tracing()
                self._body()
        except Unwind:
            pass
        except BaseException as exc:  # the program's own errors never come this far: it is ours
            self.world.crash = exc
        finally:
            self.finished = True
            self.request = None
            _here.task = None
            if self.part():
                self.world.baton.give_for_good()

    # -- in the scheduler

    def part(self) -> bool:
        """Return True to the first caller only: the thread, which then gives the baton for the last time, or the
        scheduler.

        The scheduler then continues without the thread. If both did, two threads would run at once.
        """
        return self._parting.acquire(False)

    def _drive(self, at_once: bool) -> Generator[simpy.Event, Any, None]:
        env = self.world.env
        if not at_once:
            try:
                yield env.timeout(0)
            except simpy.Interrupt:  # its process is killed before it begins: the thread does nothing
                if self.doom is None:
                    raise
        if self.finished:
            return
        self.cores = self.world.core.cores  # the thread that begins another has it run where it does itself
        begin_thread(self._thread_main, self.world.live_tasks)
        self._has_thread = True
        throw: BaseException | None = None
        while self.resume(throw):
            throw = None
            request = self.request
            assert request is not None
            limit = None
            begun_s, debt, self.debt_s = float(env.now), self.debt_s, 0.0
            why, coming, self.coming = request.why, self.coming, None
            try:
                if coming is not None:
                    before_s, call = coming
                    request.why = None  # so far it computes
                    if before_s > 0.0:
                        yield env.timeout(before_s)
                    request.why, coming = why, None
                    begun_s, debt = float(env.now), debt - before_s
                    try:
                        call.arrive()
                    finally:
                        del call  # it holds the call's tensors
                if debt > 0.0:
                    yield Nap(env, debt) if request.quiet else env.timeout(debt)
                if request.event is not None:
                    self.blocked_since_s = float(env.now)
                    if request.timeout_s is not None:
                        limit = self.world.limit_wait(self, request)
                    yield request.event
            except simpy.Interrupt as interrupt:
                throw = interrupt.cause
                if isinstance(throw, SignalArrived):
                    self._keep_the_rest(request, begun_s, debt, coming)
            except Exception as exc:  # the event failed: its exception belongs to the thread
                throw = exc
            finally:
                request.why = why
                if limit is not None:
                    limit.over = True
                if self.blocked_since_s is not None:
                    if self is self.process.main_task:  # what other threads wait for costs the rank nothing
                        self.process.times.account_wait(request.why, self.blocked_since_s, float(env.now))
                    self.blocked_since_s = None
            if self.process.thaw is not None:
                throw = yield from self._stopped(throw)
        if self.abandoned:
            return
        if not self.done.triggered:
            self.done.succeed()
        if self is self.process.main_task:
            self.world.process_ended(self.process)

    def _keep_the_rest(
        self, request: BatonRequest, begun_s: float, debt: float, coming: tuple[float, Arrives] | None
    ) -> None:
        """Store the rest of a wait that a signal interrupted."""
        passed_s = float(self.world.env.now) - begun_s
        if coming is not None:
            self.coming = (max(0.0, coming[0] - passed_s), coming[1])
        self.debt_s = max(0.0, debt - passed_s)
        if request.timeout_s is not None:
            request.timeout_s = max(0.0, request.timeout_s - max(0.0, passed_s - debt))

    def _stopped(self, throw: BaseException | None) -> Generator[simpy.Event, Any, BaseException | None]:
        """Wait until the process continues or is killed."""
        while self.process.thaw is not None and self.doom is None:
            try:
                yield self.process.thaw
            except simpy.Interrupt as interrupt:
                throw = interrupt.cause
        return throw

    def resume(self, throw: BaseException | None) -> bool:
        """Give the thread the baton until it returns it; return False once it has ended."""
        if self.finished or self.abandoned:
            return False
        self._throw = throw
        self.world.enter(self.process)
        shared_state = self.world.shared_state
        if shared_state is not None:
            shared_state.give(self.process.rank, self.native, float(self.world.env.now), self.world.events)
        self.world.let_run(self, self._go.give)
        if shared_state is not None:
            shared_state.take()
        if self.finished or self.abandoned:
            self.world.live_tasks -= 1
            return False
        return True

    def interrupt(self, cause: BaseException) -> None:
        if self._driver.is_alive:
            self._driver.interrupt(cause)

    def end(self, unwind: Unwind) -> None:
        """Make the thread unwind now, whatever it waits for. Used when its process or the world ends."""
        self.doom = unwind
        if not self._has_thread:
            self.cancel()
        for _ in range(10_000):
            if not self.resume(unwind):
                if not self.done.triggered:
                    self.done.succeed()
                return
        self.abandoned = True

    def cancel(self) -> None:
        """End a thread that has not started."""
        self.finished = True
        self.world.live_tasks -= 1

    def raise_inside(self, unwind: type[Unwind]) -> None:
        """Ask a thread that never yields (`while True: pass`) to end at its next bytecode."""
        if not self.finished and self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(unwind))

    def stop_asking(self) -> None:
        """Withdraw the exception of `raise_inside` from a thread that blocks outside of Python.

        While such an exception is pending, CPython 3.11 makes every thread check for one at each step, and a traced
        thread then makes no progress. The flag is cleared when any thread takes such an exception.
        """
        if not self.finished and self.ident is not None:
            ask = ctypes.pythonapi.PyThreadState_SetAsyncExc
            ask(ctypes.c_ulong(self.ident), None)
            try:
                ask(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(_Taken))
                while True:
                    pass
            except _Taken:
                pass

    @property
    def wait_reason(self) -> Wait | None:
        return None if self.request is None else self.request.why

    @property
    def communicates(self) -> bool:
        return isinstance(self.wait_reason, CallWait)

    def frame(self) -> Any:
        """Return the innermost Python frame of the thread, for a report on where it is."""
        return None if self.ident is None else sys._current_frames().get(self.ident)


# -- Maps a future to the calls that complete it, so that a wait for the future counts as a wait for those calls.

_Future = FUTURE.get()

is_done = _Future.done
"""torch's `Future.done`, which passes no virtual time."""

_sources: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""For each future, the futures on which it depends, if calls complete these (Reply, CallFuture)."""


def made_of(future: Any, sources: Iterable[Any]) -> None:
    """Declare that *future* is done when *sources* are."""
    known = tuple(source for source in sources if hasattr(source, "why") or source in _sources)
    if known:
        _sources[future] = known


def calls_behind(future: Any) -> Iterator[Any]:
    """Yield the futures of unfinished calls on which *future* depends, in order."""
    open_ = [future]
    while open_:
        one = open_.pop()
        if is_done(one):
            continue
        if hasattr(one, "why"):
            yield one
        else:
            open_.extend(reversed(_sources.get(one, ())))


def why_it_waits(future: Any) -> Wait:
    """Return the first unfinished call on which *future* depends."""
    for one in calls_behind(future):
        why: Wait = one.why
        return why
    return HostWait("a torch.futures.Future")
