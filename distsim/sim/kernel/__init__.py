"""The simulator's heart: virtual time, tasks and the baton that lets exactly one run.

Knows no torch and no rank. `task.py` is one thread of the user's program, `scheduler.py` lets one after the other run.
"""

from __future__ import annotations

__all__ = [
    "baton",
    "interrupts",
    "schedule",
    "scheduler",
    "task",
]
