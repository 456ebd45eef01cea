"""Signals to the simulating process, acted upon where the baton is known to be somewhere.

A Python signal handler that raises would do so between any two bytecodes of the scheduler, also in the
middle of handing the baton over. So while a simulation runs the handlers only take note. Ctrl-C
(`interruptible`) then ends the run, so that it can still say where every rank is; the handlers of other
signals (`Interrupts`: pytest-timeout's SIGALRM) are called by the scheduler between two events.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["Interrupts", "interruptible"]

_real_signal, _real_getsignal = signal.signal, signal.getsignal
DEFERRED = (signal.SIGALRM, signal.SIGTERM)


class Interruptible(Protocol):
    """A scheduler, which looks whether it was interrupted."""

    interrupted: bool
    beacon: Any


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
            if callable(handler):
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


@contextmanager
def interruptible(world: Interruptible) -> Iterator[None]:
    """Within this, SIGINT only asks *world* to stop; asked twice, it is the KeyboardInterrupt it always is."""
    if (
        threading.current_thread() is not threading.main_thread()
        or _real_getsignal(signal.SIGINT) != signal.default_int_handler
    ):
        yield
        return

    def ask(number: int, frame: object) -> None:
        if world.interrupted:
            raise KeyboardInterrupt
        world.interrupted = True
        if world.beacon is not None:
            world.beacon.noted_interrupt()

    _real_signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        _real_signal(signal.SIGINT, signal.default_int_handler)
