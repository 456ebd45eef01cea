"""What the guard keeps alive: handles that C++ alone holds (below torch 2.7), and nothing of the program."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Work
from torch.futures import Future

from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard import handle as handles
from distsim.realexec.guard.handle import HostHandle, keep_alive, watched
from distsim.realexec.guard.recorder import Recorder


class Ended(Work):
    """The Work of a backend, which has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        future: Future[Any] = Future()
        future.set_result([torch.ones(1)])
        return future


@pytest.fixture
def log(tmp_path: Path) -> Any:
    ring = RingWriter(tmp_path / "r.ring", rank=0, world_size=1, local_rank=0, job="j", attempt=0)
    return Recorder(ring).group_log("0", "default_pg", (0,))


@pytest.fixture(autouse=True)
def _none_alive() -> None:
    handles._alive.clear()


def lives(log: Any, index: int, owned: bool, act: str | None) -> bool:
    """Whether a handle outlives its last reference in Python, and the next call after it."""
    handle = watched(HostHandle, Ended(), log, index, owned)
    keep_alive(handle)
    alive = weakref.ref(handle)
    if act is not None:
        getattr(handle, act)()
    del handle
    keep_alive(watched(HostHandle, Ended(), log, index + 1, False))
    return alive() is not None


def begin(log: Any) -> int:
    recorder = log.recorder
    return int(recorder.note(log, "all_reduce", next(log.seq)))


@pytest.mark.parametrize(("act", "kept"), [(None, True), ("wait", False), ("get_future", False)])
def test_a_handle_stays_until_somebody_has_waited(log: Any, act: str | None, kept: bool) -> None:
    """C++ that waits for a handle without its Python object never comes back (DDP's constructor)."""
    first = begin(log)
    begin(log)
    assert lives(log, first, owned=False, act=act) is kept


def test_a_users_handle_is_not_kept(log: Any) -> None:
    """One that a program drops is reported: async_never_waited."""
    first = begin(log)
    begin(log)
    assert not lives(log, first, owned=True, act=None)
