"""Futures that a program made of those of its calls: `then`, `collect_all`, `wait_all`. Who waits for one waits for the
calls behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distsim.debug.rings import layout as rings
from distsim.realexec.guard.recorder import Recorder

__all__ = ["Derived"]

MOST = 1024
"""From so many on those whose calls are all over are let go of."""


class Derived:
    """Of one worker. *calls*: id of a call's future -> index of its record."""

    def __init__(self, recorder: Recorder, calls: dict[int, int]) -> None:
        self._recorder = recorder
        self._calls = calls
        self._known: dict[int, tuple[Any, frozenset[int]]] = {}
        """id of a future -> itself, so that the id stays its own, and the records of the calls behind it."""

    def made(self, future: Any, of: Iterable[Any]) -> None:
        """*future* is done when those *of* which it was made are."""
        behind: set[int] = set()
        for source in of:
            index = self._calls.get(id(source))
            if index is not None:
                behind.add(index)
            elif id(source) in self._known:
                behind |= self._known[id(source)][1]
        if not behind:
            return
        if len(self._known) >= MOST:
            open_ = self._recorder.outstanding
            self._known = {ident: known for ident, known in self._known.items() if any(i in open_ for i in known[1])}
        self._known[id(future)] = future, frozenset(behind)

    def wait(self, future: Any, original: Callable[[Any], Any]) -> Any:
        """`future.wait()` of one that is no call's own."""
        known = self._known.pop(id(future), None)
        if known is None:
            return original(future)
        recorder = self._recorder
        waits = [index for index in sorted(known[1]) if index in recorder.outstanding]
        for index in waits:
            recorder.ring.mark(index, rings.WAITING | rings.WAITED)
        try:
            return original(future)
        finally:
            for index in waits:
                if not recorder.look_at(index):  # another has failed, which ends the wait for all
                    recorder.ring.unmark(index, rings.WAITING)
