"""The baton between threads that run in turns, and the one core that they run on."""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import simpy

from distsim.errors import UsageError
from distsim.watchdog.process import machine_memory

# -- One core for threads that run in turns.
#
# Threads that hand a baton to and fro are never two at a time, yet the kernel wakes each on a core that is idle:
# another one, which has to be woken itself and has none of the data in its caches. On one core a hand-over takes a
# third (tools/benchmarks/sim_hand_over.py). But a thread that is held to a core waits there even while others are
# idle: so this looks how much of the time the process runs, and where somebody else wants the core, all may run
# anywhere again.

LOOK_S = 0.02
"""Seconds between two measurements of the share of time that this process runs."""
IDLE_SHARE = 0.15
"""Idle share of that time above which another program uses this core, or the program waits for a disk.

One of the threads always runs: 0.00 to 0.11 was measured on an unshared core, 0.4 beside one computing process, 0.6
beside two.
"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds during which the threads may use all cores before one core is tried again; doubled at each conflict."""
FAST_ENOUGH = 0.9
"""Clock rate relative to the fastest core that a core must have: laptops have slow cores that save power."""

monotonic, process_time = time.monotonic, time.process_time
cores_of, put_on = getattr(os, "sched_getaffinity", None), getattr(os, "sched_setaffinity", None)
"""The operating system's functions; ranks see patched ones (processes/signals.py). None if not on Linux."""


class _Bound(Protocol):
    """A thread that may run on *cores*, as far as its task knows."""

    native: int
    cores: frozenset[int] | None


class Busy:
    """State of the cores as this process measured it, kept over its simulations."""

    pause_s = FIRST_PAUSE_S
    until_s = 0.0


def _core_function() -> Callable[[], int] | None:
    try:
        function: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None
    return function


core_now = _core_function()


def clock_khz(core: int) -> int:
    """Return the highest clock of *core*; 0 if the kernel does not say."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def thread_ids() -> set[int]:
    """Return the kernel's list of this process's threads."""
    with suppress(OSError, ValueError):
        return set(map(int, os.listdir("/proc/self/task")))
    return set()


class OneCore:
    """Pins the threads of one simulation to a core; entered and left by the scheduling thread."""

    def __init__(self) -> None:
        self.cores: frozenset[int] | None = None
        """Cores on which the threads run; None: those on which they began."""
        self.all: frozenset[int] | None = None
        """Cores that the surrounding program may use; None outside of `with`, and if there is no choice."""
        self._fast: frozenset[int] = frozenset()
        self._there: set[int] = set()
        """The process's threads when this was entered."""
        self._looked_s = self._ran_s = 0.0

    def __enter__(self) -> None:
        if cores_of is None or core_now is None:
            return
        cores = frozenset(cores_of(0))
        if len(cores) > 1:
            clocks = {core: clock_khz(core) for core in cores}
            self._fast = frozenset(core for core in cores if clocks[core] >= FAST_ENOUGH * max(clocks.values()))
            self.all, self._there = cores, thread_ids()
            self._look_again(monotonic())

    def __exit__(self, *exc: object) -> None:
        cores, self.cores, self.all = self.all, None, None
        if cores is not None:
            self._put(0, cores)
            for native in thread_ids() - self._there:  # a library's, or left behind: begun by a thread on one core
                with suppress(OSError):
                    if len(cores_of(native)) == 1:  # type: ignore[misc]
                        self._put(native, cores)

    def bind(self, task: _Bound) -> None:
        """Move the waiting thread of *task* to the common core."""
        if task.native:
            if self.cores is not None:
                self._put(task.native, self.cores)
            task.cores = self.cores

    def release(self, task: _Bound) -> None:
        """Let *task*, which the scheduler has given up on, run on any core in parallel to the other tasks."""
        if self.all is not None and task.native:
            self._put(task.native, self.all)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let programs and library threads that the calling thread starts run on any core."""
        if self.all is None or self.cores in (None, self.all) or cores_of is None or frozenset(cores_of(0)) == self.all:
            yield  # within another, too
            return
        self._put(0, self.all)
        try:
            yield
        finally:
            if self.cores is not None:  # others may want the core by now
                self._put(0, self.cores)

    def look(self) -> None:
        """Check for a better core. Called after each event and while a thread keeps the baton, by the thread that
        entered.
        """
        if self.all is not None:
            now_s = monotonic()
            if now_s - self._looked_s > LOOK_S:
                self._look_again(now_s)

    def _look_again(self, now_s: float) -> None:
        ran_s = process_time()
        idle_s = (now_s - self._looked_s) - (ran_s - self._ran_s)
        if self.cores is None or self.cores is self.all:
            if now_s > Busy.until_s:
                self._take()
        elif self.all is not None and idle_s > IDLE_SHARE * (now_s - self._looked_s):
            self.cores = self.all
            self._put(0, self.all)
            Busy.until_s = now_s + Busy.pause_s
            Busy.pause_s = min(LONGEST_PAUSE_S, 2 * Busy.pause_s)
        elif now_s > Busy.until_s + 2 * Busy.pause_s:
            Busy.pause_s = FIRST_PAUSE_S
        self._looked_s, self._ran_s = now_s, ran_s

    def _take(self) -> None:
        """Bind all threads to the core on which this one runs, which the kernel has chosen."""
        assert core_now is not None
        core = core_now()
        if core in self._fast:
            self.cores = frozenset((core,))
            self._put(0, self.cores)

    def _put(self, native: int, cores: frozenset[int]) -> None:
        assert put_on is not None
        with suppress(OSError):  # the thread has ended, or the machine's cores have changed
            put_on(native, cores)


_real_monotonic = time.monotonic
_real_open = open


def own_s(native: int) -> float:
    """Return seconds of a clock that stops while thread *native* could run but the machine is busy with other work.

    Linux provides that time; on other systems this is the wall clock.
    """
    try:
        with _real_open(f"/proc/self/task/{native}/schedstat") as file:
            kept_waiting_s = int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        kept_waiting_s = 0.0
    return _real_monotonic() - kept_waiting_s


def disk_reads(native: int) -> str:
    """Return a number that grows while disks bring what thread *native* reads, pages of its code among it.

    Linux has it (proc_pid_io(5)); on other systems it is empty.
    """
    with suppress(OSError), _real_open(f"/proc/self/task/{native}/io") as file:
        return next((line for line in file if line.startswith("read_bytes")), "")
    return ""


# -- The baton between two threads: whoever lets the other run waits until it is let run again.
#
# A lock of Python's does this, too, at twice the price: its `release` wakes the other thread while this one still
# holds the interpreter (the GIL), so that the other runs into that and sleeps once more. Here the interpreter is free
# by then: C's semaphores are called through ctypes, which lets it go around each call.

_SEMAPHORE_BYTES = 64
"""Bytes reserved for a semaphore, more than any libc's `sem_t` needs (glibc: 32)."""
_monotonic_ns = time.monotonic_ns


class _Moment(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _functions() -> Any:
    """Return `sem_init`, `sem_wait`, `sem_clockwait`, `sem_post`, and one that keeps the GIL.

    None if libc cannot wait by the monotonic clock (glibc before 2.30, macOS).
    """
    try:
        libc, kept = ctypes.CDLL(None), ctypes.PyDLL(None)
        return libc.sem_init, libc.sem_wait, libc.sem_clockwait, libc.sem_post, kept.sem_post
    except (AttributeError, OSError, TypeError):
        return None


LIBC = _functions()


class Baton:
    """Baton of one of two threads, initially not given."""

    give: Callable[[], object]
    """Let the other thread run. The caller must then only wait for its own baton. The result is never true."""
    give_for_good: Callable[[], object]
    """Give the baton from a thread that ends: the thread keeps the interpreter lock until it has ended."""
    waits: Callable[[], object]
    """Wait for the baton; true if the caller has to wait again because a signal arrived.

    It is implemented in C, so that not even a trace function runs between `give` and this on one line.
    """

    def __init__(self) -> None:
        if LIBC is None:
            self._begin_with_lock()
            return
        init, wait, self._wait_until, post, post_and_keep = LIBC
        self._memory = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._at = ctypes.byref(self._memory)
        init(self._at, 0, 0)
        self.give, self.waits = functools.partial(post, self._at), functools.partial(wait, self._at)
        self.give_for_good = functools.partial(post_and_keep, self._at)

    def _begin_with_lock(self) -> None:
        lock = _thread.allocate_lock()
        lock.acquire()
        self.give = self.give_for_good = lock.release
        self.waits = lambda: not lock.acquire()
        self._wait_until = None
        self._lock = lock

    def wait(self) -> None:
        """Wait until the baton is given."""
        while self.waits():
            pass

    def wait_for(self, seconds: float) -> bool:
        """Wait for the baton; return False after *seconds*, or if a signal arrives."""
        if self._wait_until is None:
            return self._lock.acquire(timeout=seconds)
        at = _monotonic_ns() + int(seconds * 1e9)
        moment = _Moment(at // 1_000_000_000, at % 1_000_000_000)
        return not self._wait_until(self._at, time.CLOCK_MONOTONIC, ctypes.byref(moment))


def begin_thread(run: Callable[[], None], wanted: int) -> None:
    """Start a thread that calls *run*; *wanted* is the number of threads that are to exist.

    Raises:
        UsageError: The system has no room for another thread.
    """
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        raise UsageError(
            f"each simulated rank is a thread, {wanted:,} in all, and this machine gives no more of them: raise its "
            "limits (ulimit -u, ulimit -v, /proc/sys/kernel/threads-max, a container's pids), or simulate fewer ranks "
            "(--nproc-per-node)"
        ) from None


RANK_BYTES = 200_000
"""Memory of a rank that does nothing: its thread, its modules and its groups."""


def check_memory(ranks: int) -> None:
    """Raise UsageError if this machine has no memory for so many threads of ranks, before the system kills the run."""
    free = float("inf")
    with suppress(OSError):  # only Linux says it
        free = machine_memory()[1]
    if ranks * RANK_BYTES > free:
        raise UsageError(
            f"{ranks:,} ranks need at least {ranks * RANK_BYTES / 1e9:.0f} GB of memory, and this machine has "
            f"{free / 1e9:.1f} GB left: simulate fewer ranks (--nnodes, --nproc-per-node), or programs on GPUs by a "
            "sample of their ranks (--ranks sample)"
        )


class PollEvent(simpy.Event):
    """Wakes a thread that polls for a change."""


class Nap(PollEvent):
    """Wakes a polling thread after some virtual time."""

    def __init__(self, env: simpy.Environment, delay_s: float) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, delay=delay_s)
