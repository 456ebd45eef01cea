"""What brings MPI's non-blocking calls forward.

MPI moves bytes only while somebody is inside it. That is whoever waits for a call; and for those that nobody waits
for, a thread that looks in every millisecond. All of them ask here, one at a time: MPI is given to a single thread
at once, which every MPI that knows threads allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distsim.realexec.mpi.library import BEFORE_THE_END, mpi

__all__ = ["PROGRESS"]

INTERVAL_S = 0.001
"""Between two looks of the thread: a call that nobody waits for ends at most so much later."""
SPIN_S = 0.0005
"""So long somebody who waits asks again at once; after that he leaves the core to others in between."""
PAUSE_S = 0.00005


class Begun(Protocol):
    """A call that is under way (`MpiWork`)."""

    requests: list[Any]
    over: bool

    def ends(self, statuses: Sequence[Any], error: BaseException | None) -> None:
        """Its requests are over."""


class Progress:
    """All calls of a process that are under way."""

    def __init__(self) -> None:
        self._mpi = threading.RLock()
        """Held by whoever is inside MPI."""
        self._open: list[Begun] = []
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self._stopped = False

    def alone(self) -> AbstractContextManager[Any]:
        """Be the one who is inside MPI."""
        return self._mpi

    def start(self, work: Begun, begin: Callable[[], Sequence[Any]]) -> None:
        """Have *begin* start MPI's calls; *work* ends when all of them have."""
        with self._mpi:
            work.requests = list(begin())
            self._open.append(work)

    def step(self) -> None:
        """Let MPI move, and end what has come to its end."""
        ended: list[tuple[Begun, list[Any], BaseException | None]] = []
        with self._mpi:
            library = mpi()
            for work in self._open:
                statuses = [library.Status() for _ in work.requests]
                try:
                    if library.Request.Testall(work.requests, statuses):
                        ended.append((work, statuses, None))
                except library.Exception as said:
                    ended.append((work, statuses, RuntimeError(f"MPI: {said}")))
            for work, _, _ in ended:
                self._open.remove(work)
        for work, statuses, error in ended:  # what waits for them may make calls of its own
            work.ends(statuses, error)

    def until(self, work: Begun, seconds: float | None) -> bool:
        """Wait for *work*, at most *seconds*; whether it has ended."""
        begun = time.monotonic()
        while not work.over:
            self.step()
            if work.over:
                break
            waited = time.monotonic() - begun
            if seconds is not None and waited > seconds:
                return False
            if waited > SPIN_S:
                time.sleep(min(INTERVAL_S, PAUSE_S + waited / 20))
        return True

    def go_on_alone(self) -> None:
        """Somebody has started a call, and computes on."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="distsim-mpi", daemon=True)
            self._thread.start()
        self._asked.set()

    def _run(self) -> None:
        while not self._stopped:
            self._asked.wait()
            self._asked.clear()
            while self._open and not self._stopped:
                time.sleep(INTERVAL_S)
                self.step()

    def stop(self) -> None:
        """Nobody but who waits moves MPI from here on."""
        self._stopped = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join()


PROGRESS = Progress()
BEFORE_THE_END.append(PROGRESS.stop)
