"""Threads for what a program hangs on a future of a held call (`Future.then`, a DDP communication hook)."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["drain", "run_apart"]

LOOK_S = 0.01
QUIET_LOOKS = 2
"""A job that sleeps through so many looks in a row waits for something, maybe for what a later one does."""
LEAVE_S = 2.0
"""Seconds that the end of the process waits for running callbacks."""


class _Turn:
    """A job's place in the order."""

    def __init__(self, job: Callable[[], object], before: _Turn | None) -> None:
        self.job = job
        self.before = before
        self.begun, self.done = threading.Event(), threading.Event()
        self._thread = 0
        self._clock = 0
        self._used_s = 0.0

    def take(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            before.begun.wait()
            before.ends_or_waits()
        self._thread, self._clock = threading.get_native_id(), time.pthread_getcpuclockid(threading.get_ident())
        self.begun.set()
        try:
            self.job()
        except Exception:  # a job that is waiting counts on this thread
            traceback.print_exc()
        del self.job  # and the tensors it holds: the next turn knows this one
        self.done.set()

    def ends_or_waits(self) -> None:
        """Return once the job has ended, or sleeps. One that computes, or wants to on a machine that is busy, does
        not: were the next to begin, the two would make their calls in an order that differs from rank to rank."""
        quiet = 0
        while quiet < QUIET_LOOKS:
            began_s = time.monotonic()
            if self.done.wait(LOOK_S):
                return
            in_time = time.monotonic() - began_s < 2 * LOOK_S
            quiet = quiet + 1 if in_time and self._sleeps() else 0

    def _sleeps(self) -> bool:
        try:
            used_s = time.clock_gettime(self._clock)
            with open(f"/proc/self/task/{self._thread}/stat", "rb") as file:
                runs = file.read().rpartition(b")")[2].split()[0] == b"R"
        except OSError:  # it is about to end
            return False
        moved, self._used_s = used_s != self._used_s, used_s
        return not moved and not runs


class _Pool:
    """Starts jobs in their order, each after the one before it or once that one is seen to wait: callbacks that make
    calls of their own make them in one order on every rank. Grows by a thread whenever all are inside: a callback may
    wait for another call, whose own future may have callbacks that wait, and so on. With any fixed number of threads
    the last one would wait for ever."""

    def __init__(self) -> None:
        self._turns: SimpleQueue[_Turn] = SimpleQueue()
        self._lock = threading.Condition()
        self._open = 0
        """Jobs that have not ended."""
        self._last: _Turn | None = None
        self._idle = 0
        """Threads that wait for a job and that no job in the queue counts on."""

    def run(self, job: Callable[[], object]) -> None:
        with self._lock:
            idle = self._idle > 0
            if idle:
                self._idle -= 1
            self._open += 1
            self._last = turn = _Turn(job, self._last)
            self._turns.put(turn)
        if not idle:
            threading.Thread(target=self._work, name="distsim-callbacks", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._turns.get().take()
            with self._lock:
                self._idle += 1
                self._open -= 1
                self._lock.notify_all()

    def drain(self, limit_s: float) -> bool:
        """Wait until all jobs have ended; False: some have not in *limit_s*."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, limit_s)


_pool = _Pool()


def run_apart(job: Callable[[], object]) -> None:
    """Run *job* on a thread where it may block for as long as it likes."""
    _pool.run(job)


def drain() -> bool:
    """Wait for callbacks before the interpreter shuts down, which would crash a thread that is inside torch's C++."""
    return _pool.drain(LEAVE_S)
