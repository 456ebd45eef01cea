"""Threads for what a program hangs on a future of a held call (`Future.then`, a DDP communication hook)."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["run_apart"]


class _Pool:
    """Grows by a thread whenever all are inside: a callback may wait for another call, whose own future may
    have callbacks that wait, and so on. With any fixed number of threads the last one would wait for ever."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        """Threads that wait for a job and that no job in the queue counts on."""

    def run(self, job: Callable[[], object]) -> None:
        with self._lock:
            idle = self._idle > 0
            if idle:
                self._idle -= 1
        self._jobs.put(job)
        if not idle:
            threading.Thread(target=self._work, name="distsim-callbacks", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                self._jobs.get()()
            except Exception:  # a job that is waiting counts on this thread
                traceback.print_exc()
            with self._lock:
                self._idle += 1


_pool = _Pool()


def run_apart(job: Callable[[], object]) -> None:
    """Run *job* on a thread where it may block for as long as it likes; it starts at once."""
    _pool.run(job)
