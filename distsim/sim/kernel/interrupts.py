"""Signals to the simulating process, acted upon where the baton is known to be somewhere.

A Python signal handler that raises would do so between any two bytecodes of the scheduler, also in the
middle of handing the baton over. So while a simulation runs the handlers only take note. Ctrl-C
(`CtrlC`) then ends the run, so that it can still say where every rank is; handlers of the caller's
own (`Interrupts`: pytest-timeout's SIGALRM, asyncio's SIGINT) are called by the scheduler between two
events, or while a rank computes. One that raises ends the run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["CtrlC", "Interrupts"]

_real_signal, _real_getsignal = signal.signal, signal.getsignal
DEFERRED = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)


class Interruptible(Protocol):
    """A scheduler, which looks whether it was interrupted."""

    interrupted: bool
    ended: bool
    running: Any
    shared_state: Any


class Interrupts:
    """Signals that came and were not delivered yet."""

    def __init__(self) -> None:
        self.pending: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def deliver(self) -> None:
        """Call the real handlers of what has come; they may raise."""
        while self.pending:
            handler, args = self.pending.pop(0)
            handler(*args)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Take note only, for a while; what came last is delivered at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield  # handlers run in the main thread, so nothing can come here
            return
        saved = {}
        for number in DEFERRED:
            handler = _real_getsignal(number)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), CtrlC):
                saved[number] = handler
                _real_signal(number, self._note(handler))
        try:
            yield
        finally:
            for number, handler in saved.items():
                _real_signal(number, handler)
        self.deliver()

    def _note(self, handler: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args: self.pending.append((handler, args))


class CtrlC:
    """Within this, SIGINT only asks the world to stop, and nothing is cut off halfway that a simulation puts in place
    or takes away: what is pressed meanwhile is known to who comes after."""

    def __init__(self) -> None:
        self.pressed = False
        self.heeded = False
        """The world has stopped because of it, and no rank runs."""
        self._world: Interruptible | None = None
        self._ours = False

    def asks(self, world: Interruptible) -> None:
        """From now on it is *world* that is asked."""
        self._world, world.interrupted = world, self.pressed

    def __enter__(self) -> CtrlC:
        self._ours = (
            threading.current_thread() is threading.main_thread()
            and _real_getsignal(signal.SIGINT) == signal.default_int_handler
        )
        if self._ours:
            _real_signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ours:
            _real_signal(signal.SIGINT, signal.default_int_handler)
        if self.pressed and kind is not None and not issubclass(kind, KeyboardInterrupt):
            raise KeyboardInterrupt  # no outcome would tell of it

    def _press(self, number: int, frame: object) -> None:
        world = self._world
        if self.pressed and world is not None and not world.ended and (self.heeded or world.running is None):
            raise KeyboardInterrupt  # asked twice, while it thinks: a diagnosis of many ranks, say
        self.pressed = True
        if world is not None:
            world.interrupted = True
            if world.shared_state is not None:
                world.shared_state.noted_interrupt()
