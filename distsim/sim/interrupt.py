"""Ctrl-C: the scheduler stops at its next safe place, so that it can still say where every rank is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.sim.world import World

__all__ = ["interruptible"]


@contextlib.contextmanager
def interruptible(world: World) -> Iterator[None]:
    """Within this, SIGINT only asks *world* to stop; asked twice, it is the KeyboardInterrupt it always is."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) != signal.default_int_handler
    ):
        yield
        return

    def ask(number: int, frame: object) -> None:
        if world.interrupted:
            raise KeyboardInterrupt
        world.interrupted = True

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
