"""Hooks that notice how a process ends, and record it while the guard still can."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from distsim.debug.records.frames import outward, program_frames, steps
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.handle import settle
from distsim.realexec.process.session import Session


def _at_the_end(frame: FrameType) -> bool:
    """Return whether the interpreter calls the exception hook because the program ends.

    A program may also call the hook itself to print an exception that it has caught, and continue.
    """
    *_, outermost = outward(frame)
    return threading.current_thread() is threading.main_thread() and outermost.f_code.co_name != "<module>"


def _in_a_call(error: BaseException | None) -> bool:
    """Return whether a call of torch.distributed raised *error*."""
    trace = None if error is None else error.__traceback__
    return any(frame.f_code.co_filename.endswith("/distributed_c10d.py") for frame, _ in traceback.walk_tb(trace))


REPLACE = ("execv", "execve")


class EndHooks:
    """Hooks that notice how the process ends: by an exception, sys.exit, os._exit, or the interpreter's end."""

    def __init__(self, session: Callable[[], Session | None]) -> None:
        self._session = session
        self._excepthook: Any = None
        self._unraisable: Any = None
        self._exit: Any = None
        self._replace: dict[str, Any] = {}

    def install(self) -> None:
        self._excepthook, self._unraisable = sys.excepthook, sys.unraisablehook
        self._exit = os._exit
        previous, unraisable_before, exit_ = self._excepthook, self._unraisable, self._exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            session = self._session()
            if session is not None and _at_the_end(sys._getframe()):
                with contextlib.suppress(Exception):
                    session.raised(error)
            previous(kind, error, trace)

        def unraisable(ignored: Any) -> None:
            session = self._session()
            if session is not None and "atexit callback" in (ignored.err_msg or "") and _in_a_call(ignored.exc_value):
                with contextlib.suppress(Exception):
                    session.raised(ignored.exc_value)
            unraisable_before(ignored)

        def leave(status: int) -> None:
            session = self._session()
            if session is not None:  # whichever thread says so, all of them end
                with contextlib.suppress(Exception):
                    session.stands_at(program_frames(steps(sys._getframe(1))))
                    session.exits(status)
            exit_(status)

        for name in REPLACE:
            self._replace[name] = original = getattr(os, name)
            setattr(os, name, self._replacing(original))
        self._ours = (excepthook, leave, unraisable)
        sys.excepthook, sys.unraisablehook = excepthook, unraisable
        os._exit = leave  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def remove(self) -> None:
        if sys.excepthook is self._ours[0]:
            sys.excepthook = self._excepthook
        if os._exit is self._ours[1]:
            os._exit = self._exit
        if sys.unraisablehook is self._ours[2]:
            sys.unraisablehook = self._unraisable
        for name, original in self._replace.items():
            setattr(os, name, original)
        atexit.unregister(self._at_exit)

    def _replacing(self, original: Any) -> Any:
        """Wrap `os.execv` and `os.execve`, which replace the program while the process continues."""

        @functools.wraps(original)
        def replace(*args: Any) -> Any:
            session = self._session()
            life = None if session is None else session.ring.words[rings.WORDS_AT // 8 + rings.W_LIFE]
            if session is not None:
                session.exits()
            try:
                return original(*args)
            finally:  # there is no such program
                if session is not None and life is not None:
                    session.ring.header(rings.W_LIFE, life)

        return replace

    def _at_exit(self) -> None:
        session = self._session()
        if session is not None:
            with contextlib.suppress(Exception):
                session.exits(life=rings.LIFE_ENDED)
            with contextlib.suppress(Exception):
                session.end_threads()
            with contextlib.suppress(Exception):
                if any(not child.daemon for child in multiprocessing.active_children()):
                    session.heartbeat.outlived()  # multiprocessing's own handler, which waits for them, runs later
            settle()
