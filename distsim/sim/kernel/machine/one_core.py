"""One core for threads that run in turns.

Threads that hand a baton to and fro are never two at a time, yet the kernel wakes each on a core that is idle: another
one, which has to be woken itself and has none of the data in its caches. On one core a hand-over takes a third
(tests/benchmarks/sim_hand_over.py). But a thread that is held to a core waits there even while others are idle: so this
looks how much of the time the process runs, and where somebody else wants the core, all may run anywhere again.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

__all__ = ["OneCore"]

LOOK_S = 0.02
"""Between two looks at how much of the time this process ran."""
IDLE_SHARE = 0.15
"""Of that time: more, and somebody else is on this core, or the program waits for a disk and loses nothing. One of the
threads always runs: 0.00 to 0.11 is measured on a core of its own, 0.4 beside one that computes, 0.6 beside two."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""How long the threads may run anywhere before one core is tried again; doubled each time others want that, too."""
FAST_ENOUGH = 0.9
"""Of the clock of the fastest core: laptops have cores that are half as fast, to save power."""

_monotonic, _process_time = time.monotonic, time.process_time
_get, _set = getattr(os, "sched_getaffinity", None), getattr(os, "sched_setaffinity", None)
"""The machine's: a rank's own are told what they have set (unarmed.py). None: not Linux."""


class _Bound(Protocol):
    """A thread that may run on *cores*, as far as its task knows."""

    native: int
    cores: frozenset[int] | None


class _Busy:
    """How this process has found its cores; a process makes many simulations, and the machine stays as busy."""

    pause_s = FIRST_PAUSE_S
    until_s = 0.0


def _core_function() -> Callable[[], int] | None:
    try:
        function: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None
    return function


_core_now = _core_function()


def _clock_khz(core: int) -> int:
    """The highest clock of *core*; 0 where the kernel does not say."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _threads() -> set[int]:
    """What the kernel calls this process's threads."""
    with suppress(OSError, ValueError):
        return set(map(int, os.listdir("/proc/self/task")))
    return set()


class OneCore:
    """Of one simulation: entered by the thread that lets the others run, and left by it."""

    def __init__(self) -> None:
        self.cores: frozenset[int] | None = None
        """Where its threads shall run; None: where they began."""
        self.all: frozenset[int] | None = None
        """Where the surrounding program may run; None outside of `with`, and where there is no choice."""
        self._fast: frozenset[int] = frozenset()
        self._there: set[int] = set()
        """The process's threads when this was entered."""
        self._looked_s = self._ran_s = 0.0

    def __enter__(self) -> None:
        if _get is None or _core_now is None:
            return
        cores = frozenset(_get(0))
        if len(cores) > 1:
            clocks = {core: _clock_khz(core) for core in cores}
            self._fast = frozenset(core for core in cores if clocks[core] >= FAST_ENOUGH * max(clocks.values()))
            self.all, self._there = cores, _threads()
            self._look_again(_monotonic())

    def __exit__(self, *exc: object) -> None:
        cores, self.cores, self.all = self.all, None, None
        if cores is not None:
            self._put(0, cores)
            for native in _threads() - self._there:  # a library's, or left behind: begun by a thread on one core
                with suppress(OSError):
                    if len(_get(native)) == 1:  # type: ignore[misc]
                        self._put(native, cores)

    def bind(self, task: _Bound) -> None:
        """*task*, whose thread waits, runs where all do from now on."""
        if task.native:
            if self.cores is not None:
                self._put(task.native, self.cores)
            task.cores = self.cores

    def release(self, task: _Bound) -> None:
        """*task* is left behind and runs beside the others: anywhere."""
        if self.all is not None and task.native:
            self._put(task.native, self.all)

    @contextmanager
    def left(self) -> Iterator[None]:
        """What the calling thread starts meanwhile, programs and threads of libraries, may run anywhere."""
        if self.all is None or self.cores in (None, self.all) or _get is None or frozenset(_get(0)) == self.all:
            yield  # within another, too
            return
        self._put(0, self.all)
        try:
            yield
        finally:
            if self.cores is not None:  # others may want the core by now
                self._put(0, self.cores)

    def look(self) -> None:
        """Asked after each event and while a thread keeps the baton, by the thread that entered."""
        if self.all is not None:
            now_s = _monotonic()
            if now_s - self._looked_s > LOOK_S:
                self._look_again(now_s)

    def _look_again(self, now_s: float) -> None:
        ran_s = _process_time()
        idle_s = (now_s - self._looked_s) - (ran_s - self._ran_s)
        if self.cores is None or self.cores is self.all:
            if now_s > _Busy.until_s:
                self._take()
        elif self.all is not None and idle_s > IDLE_SHARE * (now_s - self._looked_s):
            self.cores = self.all
            self._put(0, self.all)
            _Busy.until_s = now_s + _Busy.pause_s
            _Busy.pause_s = min(LONGEST_PAUSE_S, 2 * _Busy.pause_s)
        elif now_s > _Busy.until_s + 2 * _Busy.pause_s:
            _Busy.pause_s = FIRST_PAUSE_S
        self._looked_s, self._ran_s = now_s, ran_s

    def _take(self) -> None:
        """The core that it happens to be on, which the kernel has chosen."""
        assert _core_now is not None
        core = _core_now()
        if core in self._fast:
            self.cores = frozenset((core,))
            self._put(0, self.cores)

    def _put(self, native: int, cores: frozenset[int]) -> None:
        assert _set is not None
        with suppress(OSError):  # the thread has ended, or the machine's cores have changed
            _set(native, cores)
