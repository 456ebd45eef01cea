"""mpi4py: loaded with the first group, brought forward while calls are open, and ended with the process.

MPI ends with a meeting of all ranks. A rank that raised must not come to it: the others may be in a call that waits
for this very rank, and all would wait for ever. It leaves without, whereupon mpirun ends the job.

MPI moves bytes only while somebody is inside it. That is whoever waits for a call; and for those that nobody waits
for, a thread that looks in every millisecond. All of them ask `ProgressThread`, one at a time: MPI is given to a single
thread at once, which every MPI that knows threads allows.

A job of mpirun has no store, so rank 0 introduces the hosts' monitors to each other over MPI, too.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["PROGRESS", "Introduction", "found", "introduction", "meet", "mpi"]

REMEDY = "pip install -e '.[mpi]' in a clone of distsim, and an MPI (Debian: apt install openmpi-bin)"
OTHER_NAME = (
    "that is MPICH, which Debian's package has under another name: pip install mpich brings it with its mpirun, "
    "or use Open MPI's (apt install openmpi-bin)"
)
BEFORE_THE_END: list[Callable[[], None]] = []
"""Called before MPI ends, in any case: what else is inside MPI."""
_MPI: Any = None
INTERVAL_S = 0.001
"""Seconds between two polls of the thread, by which a call that is not waited for may end late."""
SPIN_S = 0.0005
"""Seconds for which a waiting thread polls without pause; after that it yields the core in between."""
PAUSE_S = 0.00005
TAG = 1
_INTRODUCTIONS: list[Introduction] = []


def found() -> bool:
    """Return whether mpi4py is installed, without importing it."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi() -> Any:
    """`mpi4py.MPI`, initialised; RuntimeError in one line where it or the MPI below it is not there."""
    global _MPI
    if _MPI is None:
        try:
            import mpi4py

            mpi4py.rc.finalize = False
            if "OMPI_COMM_WORLD_RANK" in os.environ:  # several MPIs may be installed: the one whose mpirun this was
                os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            problem = " ".join(str(error).split())
            remedy = OTHER_NAME if "libmpi.so.12" in problem else REMEDY
            raise RuntimeError(f"backend 'mpi': no MPI can be loaded ({problem}); {remedy}") from None
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                "backend 'mpi': this MPI was initialised for one thread only; import mpi4py without rc.threads = False"
            )
        _MPI = MPI
    return _MPI


def finalize_at_exit(may_end: Callable[[], bool]) -> None:
    """Register the end of MPI, to which this process comes if *may_end* says so. Functions registered after this one
    run before it."""
    atexit.register(_finalize, may_end)


def _finalize(may_end: Callable[[], bool]) -> None:
    if _MPI is None or _MPI.Is_finalized():
        return
    for stop in BEFORE_THE_END:
        stop()
    if may_end() and getattr(sys, "last_value", None) is None:
        _MPI.Finalize()


class Begun(Protocol):
    """A call that is under way (`MpiWork`)."""

    requests: list[Any]
    over: bool

    def ends(self, statuses: Sequence[Any], error: BaseException | None) -> None:
        """Note that its requests are over."""


class ProgressThread:
    """Makes progress on all calls of a process that are under way."""

    def __init__(self) -> None:
        self._mpi = threading.RLock()
        """Lock of the thread that is inside MPI."""
        self._open: list[Begun] = []
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self._stopped = False

    def alone(self) -> AbstractContextManager[Any]:
        """Be the one who is inside MPI."""
        return self._mpi

    def start(self, work: Begun, begin: Callable[[], Sequence[Any]]) -> None:
        """Let *begin* start MPI's calls; *work* ends when all of them have ended."""
        with self._mpi:
            work.requests = list(begin())
            self._open.append(work)

    def step(self) -> None:
        """Let MPI make progress, and complete finished calls."""
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
        """Stop the progress thread; from now on only waiting calls drive MPI."""
        self._stopped = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join()


PROGRESS = ProgressThread()
BEFORE_THE_END.append(PROGRESS.stop)


def meet(world: Any) -> None:
    """Learn which ranks are the first of their hosts; all ranks of *world*, a communicator, call."""
    own = world.Dup()
    first = own.allgather(os.environ.get("LOCAL_RANK") == "0")
    _INTRODUCTIONS[:] = [Introduction(own, [rank for rank, is_first in enumerate(first) if is_first and rank])]


def introduction() -> Introduction | None:
    """Return the connection over which monitors are introduced; None before MPI's ranks have met."""
    return _INTRODUCTIONS[0] if _INTRODUCTIONS else None


class Introduction:
    """A single text from rank 0 to *readers*, other ranks; the part of `torch.distributed.Store` that this takes."""

    def __init__(self, comm: Any, readers: list[int]) -> None:
        self._comm = comm
        self._readers = readers
        self._under_way: list[Any] = []
        self._read: bytes | None = None

    def set(self, key: str, value: str) -> None:
        """Send *value* without waiting for its arrival."""
        with PROGRESS.alone():
            message = [value.encode(), mpi().BYTE]
            self._under_way = [(message, self._comm.Isend(message, reader, TAG)) for reader in self._readers]

    def check(self, keys: list[str]) -> bool:
        """Return whether the text has arrived."""
        library = mpi()
        status = library.Status()
        with PROGRESS.alone():
            if self._read is None and self._comm.Iprobe(0, TAG, status):
                content = bytearray(status.Get_count(library.BYTE))
                self._comm.Recv([content, library.BYTE], 0, TAG)
                self._read = bytes(content)
        return self._read is not None

    def get(self, key: str) -> bytes:
        """The text that is here."""
        assert self._read is not None
        return self._read
