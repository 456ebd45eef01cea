"""Use of mpi4py: loading it with the first group, progress while calls are open, and its end.

MPI ends with a call in which all ranks meet. A rank that has raised must not make this call: the other ranks may be
in a collective that waits for that rank, and all would wait forever. It exits without the call, and mpirun then ends
the job.

MPI transfers data only while a thread is inside it. That is the thread that waits for a call; for calls that no
thread waits for, a helper thread polls every millisecond. All of them use `ProgressThread`, which lets one thread
into MPI at a time, as every MPI with thread support allows.

A job of mpirun has no store, so rank 0 also introduces the hosts' monitors to each other over MPI.
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

REMEDY = "pip install -e '.[mpi]' in a clone of distsim, and an MPI (Debian: apt install openmpi-bin)"
OTHER_NAME = (
    "that is MPICH, which Debian's package has under another name: pip install mpich brings it with its mpirun, "
    "or use Open MPI's (apt install openmpi-bin)"
)
BEFORE_THE_END: list[Callable[[], None]] = []
"""Functions to call before MPI ends, which stop other users of MPI."""
_MPI: Any = None
INTERVAL_S = 0.001
"""Seconds between two polls of the helper thread; a call that no thread waits for may be seen to end this much late."""
SPIN_S = 0.0005
"""Seconds for which a waiting thread polls without a pause; after that it yields the core between polls."""
PAUSE_S = 0.00005
TAG = 1
_INTRODUCTIONS: list[Introduction] = []


def is_installed() -> bool:
    """Return whether mpi4py is installed, without importing it."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi() -> Any:
    """Return `mpi4py.MPI`, initialized.

    Raises:
        RuntimeError: mpi4py or an MPI library is missing.
    """
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
    """Register MPI's end at the exit of the process, if *may_end* then returns True.

    Exit functions that are registered later run earlier.
    """
    atexit.register(_finalize, may_end)


def _finalize(may_end: Callable[[], bool]) -> None:
    if _MPI is None or _MPI.Is_finalized():
        return
    for stop in BEFORE_THE_END:
        stop()
    if may_end() and getattr(sys, "last_value", None) is None:
        _MPI.Finalize()


class Begun(Protocol):
    """Interface of a call in progress (`MpiWork`)."""

    requests: list[Any]
    over: bool

    def ends(self, statuses: Sequence[Any], error: BaseException | None) -> None:
        """Handle the completion of all its requests."""


class ProgressThread:
    """Progress of all MPI calls of a process, by waiting threads and a helper thread."""

    def __init__(self) -> None:
        self._mpi = threading.RLock()
        """Lock held by the thread that is inside MPI."""
        self._open: list[Begun] = []
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self._stopped = False

    def alone(self) -> AbstractContextManager[Any]:
        """Return a context in which only this thread may call MPI."""
        return self._mpi

    def start(self, work: Begun, begin: Callable[[], Sequence[Any]]) -> None:
        """Start MPI's calls with *begin*. *work* ends when all of them have completed."""
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
        """Wait for *work*, at most *seconds*, and return whether it has ended."""
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
        """Let the helper thread make progress on a call that no thread waits for."""
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
    """Find out which ranks are the first of their hosts. All ranks of the communicator *world* must call this."""
    own = world.Dup()
    first = own.allgather(os.environ.get("LOCAL_RANK") == "0")
    _INTRODUCTIONS[:] = [Introduction(own, [rank for rank, is_first in enumerate(first) if is_first and rank])]


def introduction() -> Introduction | None:
    """Return the connection over which monitors are introduced; None before MPI's ranks have met."""
    return _INTRODUCTIONS[0] if _INTRODUCTIONS else None


class Introduction:
    """One text sent from rank 0 to the ranks *readers*, with the methods of `torch.distributed.Store` that this
    needs.
    """

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
        """Return the text that has arrived."""
        assert self._read is not None
        return self._read
