"""The baton between threads that run in turns."""

from __future__ import annotations

import _thread
import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import simpy

from distsim.errors import UsageError

__all__ = ["Baton", "Nap", "PollEvent", "begin_thread", "own_s"]

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


_LIBC = _functions()


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
        if _LIBC is None:
            self._begin_with_lock()
            return
        init, wait, self._wait_until, post, post_and_keep = _LIBC
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


class PollEvent(simpy.Event):
    """Wakes a thread that polls for a change."""


class Nap(PollEvent):
    """Wakes a polling thread after some virtual time."""

    def __init__(self, env: simpy.Environment, delay_s: float) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, delay=delay_s)
