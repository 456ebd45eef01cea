"""What rank 0 has to tell one process of each other host, over MPI: a job of mpirun has no store."""

from __future__ import annotations

import os
from typing import Any

from distsim.realexec.mpi.library import mpi
from distsim.realexec.mpi.progress import PROGRESS

__all__ = ["Letter", "letter", "meet"]

TAG = 1
_LETTER: list[Letter] = []


def meet(world: Any) -> None:
    """Learn which ranks are the first of their hosts; all ranks of *world*, a communicator, call."""
    own = world.Dup()
    first = own.allgather(os.environ.get("LOCAL_RANK") == "0")
    _LETTER[:] = [Letter(own, [rank for rank, is_first in enumerate(first) if is_first and rank])]


def letter() -> Letter | None:
    """The way to them; None where no rank of MPI's has met the others."""
    return _LETTER[0] if _LETTER else None


class Letter:
    """A single text from rank 0 to *readers*, other ranks; the part of `torch.distributed.Store` that this takes."""

    def __init__(self, comm: Any, readers: list[int]) -> None:
        self._comm = comm
        self._readers = readers
        self._under_way: list[Any] = []
        self._read: bytes | None = None

    def set(self, key: str, value: str) -> None:
        """Send *value*; nobody waits for its arrival."""
        with PROGRESS.alone():
            what = [value.encode(), mpi().BYTE]
            self._under_way = [(what, self._comm.Isend(what, reader, TAG)) for reader in self._readers]

    def check(self, keys: list[str]) -> bool:
        """Whether the text is here."""
        library = mpi()
        status = library.Status()
        with PROGRESS.alone():
            if self._read is None and self._comm.Iprobe(0, TAG, status):
                place = bytearray(status.Get_count(library.BYTE))
                self._comm.Recv([place, library.BYTE], 0, TAG)
                self._read = bytes(place)
        return self._read is not None

    def get(self, key: str) -> bytes:
        """The text that is here."""
        assert self._read is not None
        return self._read
