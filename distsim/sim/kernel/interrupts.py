"""The simulating process: signals to it and its garbage collector."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

# -- Signals to the simulating process, acted upon where the baton is known to be somewhere.
#
# A Python signal handler that raises would do so between any two bytecodes of the scheduler, also in the
# middle of handing the baton over. So while a simulation runs the handlers only take note. Ctrl-C
# (`CtrlC`) then ends the run, so that it can still say where every rank is; handlers of the caller's
# own (`Interrupts`: pytest-timeout's SIGALRM, asyncio's SIGINT) are called by the scheduler between two
# events, or while a rank computes. One that raises ends the run.

_real_signal, _real_getsignal = signal.signal, signal.getsignal
DEFERRED = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)


class Interruptible(Protocol):
    """A scheduler, which looks whether it was interrupted."""

    interrupted: bool
    ended: bool
    running: Any
    shared_state: Any


class Interrupts:
    """Signals that have arrived and are not delivered yet."""

    def __init__(self) -> None:
        self.pending: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def deliver(self) -> None:
        """Call the real handlers of signals that have arrived; they may raise."""
        while self.pending:
            handler, args = self.pending.pop(0)
            handler(*args)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Return a context that defers signals; the last one is delivered at its end."""
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
    """Context in which signals that Python turns into KeyboardInterrupt only ask the world to stop, so that set-up and
    tear-down of a simulation are never cut in half. SIGINT is one, and SIGTERM in a process of distsim's."""

    def __init__(self) -> None:
        self.pressed = 0
        """Number of the signal that came first; 0 if none has come."""
        self.heeded = False
        """The world has stopped because of it, and no rank runs."""
        self._world: Interruptible | None = None
        self._ours: tuple[signal.Signals, ...] = ()

    def asks(self, world: Interruptible) -> None:
        """Set the world that receives interrupts from now on."""
        self._world, world.interrupted = world, self.pressed > 0

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._ours = tuple(n for n in numbers if _real_getsignal(n) == signal.default_int_handler)
        for number in self._ours:
            _real_signal(number, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number in self._ours:
            _real_signal(number, signal.default_int_handler)
        if self.pressed and kind is not None and not issubclass(kind, KeyboardInterrupt):
            raise KeyboardInterrupt  # no outcome would tell of it

    def _press(self, number: int, frame: object) -> None:
        world = self._world
        if self.pressed and world is not None and not world.ended and (self.heeded or world.running is None):
            raise KeyboardInterrupt  # asked twice, while it thinks: a diagnosis of many ranks, say
        self.pressed = self.pressed or number
        if world is not None:
            world.interrupted = True
            if world.shared_state is not None:
                world.shared_state.noted_interrupt(number)


# -- Python's garbage collector while a simulation runs: it looks at what the ranks have made, not at torch.

RUNS_PER_FULL = 500
"""Simulations after which garbage of earlier ones is collected.

`gc.unfreeze` puts all objects among the oldest, so Python itself hardly ever makes a full collection in a process that
simulates again and again (a test session). A test of 4 ranks leaves 200 KiB behind.
"""
RANKS_PER_THRESHOLD, MOST_THRESHOLDS = 16, 64
"""Ranks for which the threshold of young objects grows by one unit, and the maximum number of units.

A rank in a process of its own triggers a collection after 700 new objects. With the objects of all ranks in one
process, collections after as few took a seventh of a run of 1,024 ranks and a quarter of one of 4,096.
"""
_runs = 0


@contextmanager
def collector_spares_host(ranks: int) -> Iterator[None]:
    """Return a context in which the garbage collector ignores the 300,000 objects of torch and Python, and runs less
    often the more *ranks* there are.

    Nothing changes if the surrounding program froze objects or switched the collector off.
    """
    global _runs
    threshold = gc.get_threshold()
    if gc.get_freeze_count() or not gc.isenabled() or not threshold[0]:
        yield
        return
    _runs += 1
    if _runs % RUNS_PER_FULL == 0:
        gc.collect()
    gc.freeze()
    gc.set_threshold(threshold[0] * max(1, min(ranks // RANKS_PER_THRESHOLD, MOST_THRESHOLDS)), *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
