"""The simulating process: signals to it, its garbage collector and its heap."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

from distsim.torch_compat.works import DEBUG_HANDLERS

__all__ = ["CtrlC", "Interrupts", "fill_small_blocks", "own_threshold", "paced", "set_aside", "set_more_aside"]

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
    """Context in which SIGINT only asks the world to stop, so that set-up and tear-down of a simulation are never cut
    in half."""

    def __init__(self) -> None:
        self.pressed = False
        self.heeded = False
        """The world has stopped because of it, and no rank runs."""
        self._world: Interruptible | None = None
        self._ours = False

    def asks(self, world: Interruptible) -> None:
        """Set the world that receives interrupts from now on."""
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


# -- Python's garbage collector while a simulation runs: it looks at what the run has made, not at torch.

YOUNG_PER_FULL = 1_000
"""Collections of young objects after which garbage of earlier runs is looked for. Python's own measure for a full one
is 11 x 11 of them and a quarter more objects than before; a process with torch has 300,000, and a test of 4 ranks
leaves 700 behind, in 200 KiB."""
_young_at_last_full: float | None = None
"""Number of young objects at the last full collection; None if no simulation ran in this process.

Without a simulation there is no garbage of one, and collecting what torch's import left takes a third of a second.
"""
_spared = 0.0
"""Collections of young objects that setting aside has spared: it begins the count of them anew."""
_keeps_handlers = False
_is_ours = False
"""Whether the objects that are now frozen were frozen by this module."""

RANKS_AT_A_PACE, MOST_PACES = 16, 64
"""Ranks for which the garbage collector's threshold grows by one unit, and the maximum number of units.

In a process of its own, a rank triggers a collection after 700 new objects. With thousands of ranks in one process
each rank would have made less than one, and the collection would walk the objects of all: a seventh of a run of
1,024 ranks, a quarter of one of 4,096. The threshold therefore grows up to 64 times, to 45,000 objects.
"""
_get_threshold, _set_threshold = gc.get_threshold, gc.set_threshold
_slowed: tuple[int, int, int] | None = None
"""Thresholds of the garbage collector during a run of many ranks, unless its program has set some."""
_before: tuple[int, int, int] | None = None
"""Thresholds before they were raised; None if they were not."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Return a context in which the garbage collector ignores existing objects: some 300,000 of torch and Python. If
    the program froze objects itself, nothing changes."""
    global _young_at_last_full, _is_ours
    if gc.get_freeze_count() or not gc.isenabled():
        try:
            yield
        finally:
            _keep_handlers()
        return
    young = gc.get_stats()[0]["collections"] + _spared
    if _young_at_last_full is None:
        _young_at_last_full = young
    elif young - _young_at_last_full > YOUNG_PER_FULL:
        gc.collect()
        _young_at_last_full = young
    _is_ours = True
    _freeze()
    try:
        yield
    finally:
        _is_ours = False
        gc.unfreeze()
        _keep_handlers()


def _keep_handlers() -> None:
    """Keep torch's handlers of its debug server alive for ever, if they are imported.

    A static object of C++ frees them after Python has ended (torch 2.13, HandlerRegistry). Python aborts if they then
    have a `__dict__` to free, and a simulation that looks at a function gives it one.
    """
    global _keeps_handlers
    module = sys.modules.get(DEBUG_HANDLERS.path)
    if module is not None and not _keeps_handlers:
        _keeps_handlers = True
        for value in vars(module).values():
            if isinstance(value, FunctionType):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def paced(ranks: int) -> Iterator[None]:
    """Return a context in which the collector runs less often for more *ranks*. If it is off, it stays off."""
    global _slowed, _before, _spared
    threshold, paces = _get_threshold(), min(ranks // RANKS_AT_A_PACE, MOST_PACES)
    if paces < 2 or not threshold[0] or _slowed is not None or not gc.isenabled():
        yield
        return
    _before, _slowed = threshold, (threshold[0] * paces, *threshold[1:])
    _set_threshold(*_slowed)
    young = gc.get_stats()[0]["collections"]
    try:
        yield
    finally:
        _spared += (gc.get_stats()[0]["collections"] - young) * (paces - 1)
        if _get_threshold() == _slowed:
            _set_threshold(*_before)
        _before = _slowed = None


def own_threshold() -> tuple[int, int, int]:
    """Return the value that `gc.get_threshold` would have without other ranks."""
    threshold = _get_threshold()
    return _before if _before is not None and threshold == _slowed else threshold


def set_more_aside() -> None:
    """Exclude the objects of the simulation itself from garbage collection, because they live as long as it does."""
    if _is_ours:
        _freeze()


def _freeze() -> None:
    global _spared
    _spared += gc.get_count()[0] / max(1, gc.get_threshold()[0])
    gc.freeze()


# -- glibc's heap: why it does not take up the memory of a freed tensor again, and what is done about it.
#
# torch asks for tensors at multiples of 64 bytes (posix_memalign), so glibc takes 96 bytes more and gives the rest
# back at once. Small pieces that are given back go into a cache of the thread's own, seven of each size, where they
# count as used: what lies before them, once it is free, cannot be joined with them, and is 96 bytes too small for the
# next tensor of the same size. A process loses seven tensors of each rest's size that way and nobody notices. A
# thousand ranks lose them a thousand times (1,024 ranks with one fresh tensor of 64 KiB a call: 0.84 GiB after 10
# calls instead of 0.58, 1.2 instead of 0.60 after 40). With a cache that is full already the pieces go where they are
# joined again. (glibc 2.36, malloc/malloc.c: _int_memalign, _int_free, malloc_consolidate.)

_SIZES = range(24, 137, 16)
"""Requested sizes of the blocks that such remainders can be: 32 to 144 bytes with glibc's own 8."""
_KEPT = 7
"""Number of blocks of each size that a thread caches (TCACHE_FILL_COUNT)."""


def _heap() -> Any:
    """Return glibc's heap functions; None with another C library."""
    try:
        libc = ctypes.PyDLL(None)  # so short that the interpreter is kept
        libc.gnu_get_libc_version  # noqa: B018
    except (AttributeError, OSError, TypeError):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc


_libc = _heap()


def fill_small_blocks() -> None:
    """Fill the calling thread's cache of small blocks after long-lived objects were taken from it."""
    if _libc is not None:
        for block in [_libc.malloc(size) for size in _SIZES for _ in range(_KEPT)]:
            _libc.free(block)
