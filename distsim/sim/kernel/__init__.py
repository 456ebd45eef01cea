"""The simulator's heart: virtual time, tasks and the baton that lets exactly one run.

Knows no torch. `task.py` is one thread of the user's program, `scheduler.py` lets one after the other run, `port.py` is
what a rank may ask of its world.
"""

from __future__ import annotations

__all__ = [
    "baton",
    "chooser",
    "clocks",
    "interrupts",
    "limits",
    "port",
    "scheduler",
    "shared",
    "steps",
    "task",
    "turns",
]
