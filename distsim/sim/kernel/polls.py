"""Events of threads that look again and again: nobody has to look up when one happens."""

from __future__ import annotations

import simpy

__all__ = ["Nap", "PollEvent"]


class PollEvent(simpy.Event):
    """Wakes a thread that looks again and again for something to change."""


class Nap(PollEvent):
    """Wakes a thread that has let time pass before it looks again."""

    def __init__(self, env: simpy.Environment, delay_s: float) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, delay=delay_s)
