"""The simulator's heart: virtual time, tasks and the baton that lets exactly one run.

Knows no torch and no rank. `task.py` is one thread of the user's program.
"""

from __future__ import annotations

__all__ = [
    "baton",
    "collector",
    "deadlines",
    "future_sources",
    "interrupts",
    "limits",
    "machine",
    "polls",
    "schedule",
    "scheduler",
    "task",
    "tracing",
]
