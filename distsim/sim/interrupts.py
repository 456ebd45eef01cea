"""Signals to the simulating process, delivered where the baton is known to be somewhere.

A Python signal handler that raises (pytest-timeout's SIGALRM; Ctrl-C is interrupt.py's) would do so between any two
bytecodes of the scheduler, also in the middle of handing the baton over. So while a simulation runs
the handlers only take note, and the scheduler calls the real ones between two events.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupts"]

_real_signal, _real_getsignal = signal.signal, signal.getsignal
DEFERRED = (signal.SIGALRM, signal.SIGTERM)


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
