"""The baton between two threads: whoever lets the other run waits until it is let run again.

A lock of Python's does this, too, at twice the price: its `release` wakes the other thread while this one still holds
the interpreter (the GIL), so that the other runs into that and sleeps once more. Here the interpreter is free by then:
C's semaphores are called through ctypes, which lets it go around each call.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

from distsim.errors import UsageError

__all__ = ["Baton", "begin_thread"]

_SEMAPHORE_BYTES = 64
"""More than any libc's `sem_t` (glibc: 32)."""
_monotonic_ns = time.monotonic_ns


class _Moment(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _functions() -> Any:
    """`sem_init`, `sem_wait`, `sem_clockwait`, `sem_post`, and one that keeps the interpreter; None where libc has no
    wait by the monotonic clock (glibc before 2.30, macOS)."""
    try:
        libc, kept = ctypes.CDLL(None), ctypes.PyDLL(None)
        return libc.sem_init, libc.sem_wait, libc.sem_clockwait, libc.sem_post, kept.sem_post
    except (AttributeError, OSError, TypeError):
        return None


_LIBC = _functions()


class Baton:
    """Of one of the two threads. Nobody has let it run yet."""

    give: Callable[[], object]
    """Let it run: the caller has nothing more to do than to wait for its own. Answers nothing true."""
    give_for_good: Callable[[], object]
    """The same from a thread that ends: it keeps the interpreter until it has gone."""
    waits: Callable[[], object]
    """Wait for it; true where that has to be asked again, because a signal came. A step of C's: not even a trace
    function runs between `give` and this on one line."""

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
        """Until it is given."""
        while self.waits():
            pass

    def wait_for(self, seconds: float) -> bool:
        """The same; False where it takes longer, or a signal comes."""
        if self._wait_until is None:
            return self._lock.acquire(timeout=seconds)
        at = _monotonic_ns() + int(seconds * 1e9)
        moment = _Moment(at // 1_000_000_000, at % 1_000_000_000)
        return not self._wait_until(self._at, time.CLOCK_MONOTONIC, ctypes.byref(moment))


def begin_thread(run: Callable[[], None], wanted: int) -> None:
    """Raises UsageError where there is no room for a thread more; *wanted*: how many shall live at a time."""
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        raise UsageError(
            f"each simulated rank is a thread, {wanted:,} in all, and this machine gives no more of them: raise its "
            "limits (ulimit -u, ulimit -v, /proc/sys/kernel/threads-max, a container's pids), or simulate fewer ranks "
            "(--nproc-per-node)"
        ) from None
