"""Asynchronous calls whose end the recorder sees for itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distsim.debug.records import State
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import ring_path
from distsim.debug.rings.reader import RingReader
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.recorder import Recorder


class Lost:
    """A work that failed in the background."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:16811")


@pytest.mark.parametrize("look", [Recorder.poll, Recorder.sweep])
def test_what_failed_behind_the_programs_back_says_why(look: Callable[[Recorder], None], tmp_path: Path) -> None:
    """Who waits for its future, or in C++, raises that error: the record tells where it came from."""
    path = ring_path(tmp_path, 0, 0, "job")
    ring = RingWriter(path, rank=0, world_size=2, local_rank=0, job="job", attempt=0)
    recorder = Recorder(ring)
    log = recorder.group_log("0", "default_pg", [0, 1])
    index = recorder.note(log, "all_reduce", 1)
    recorder.watch(index, Lost(), again=True)
    look(recorder)
    reader = RingReader(path)
    call = reader.decode(reader.since(0)[0][0], 0)
    assert (call.state, call.error) == (State.FAILED, "RuntimeError: Connection closed by peer [127.0.0.1]:16811")


def _loss() -> None:
    raise RuntimeError("Connection closed by peer")


def _raised(how: str) -> BaseException:
    """What a program raised whose call had lost its peer."""
    try:
        try:
            _loss()
        except RuntimeError as error:
            if how == "from it":
                raise ValueError("bad batch") from error
            if how == "from None":
                raise ValueError("bad batch") from None
        raise ValueError("bad batch")
    except ValueError as error:
        return error


@pytest.mark.parametrize(("how", "came"), [("from it", True), ("from None", True), ("later", False)])
def test_what_an_exception_came_from_is_on_record(how: str, came: bool, tmp_path: Path) -> None:
    """Also what its traceback does not show: it tells a loss that is being handled from one that was dealt with."""
    path = ring_path(tmp_path, 0, 0, "job")
    ring = RingWriter(path, rank=0, world_size=2, local_rank=0, job="job", attempt=0)
    ring.header(rings.W_EXCEPTION, Recorder(ring).exception(_raised(how)))
    origins = RingReader(path).raised(rings.W_EXCEPTION).origins
    assert ("Connection closed by peer" in origins, "ValueError: bad batch" in origins) == (came, True)
