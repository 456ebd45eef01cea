"""Simulated processes: their life, threads, children, pipes, signals, names and numbers.

`lifetime.py` is a process from its first line to its end.
"""

from __future__ import annotations

__all__ = [
    "hosts",
    "ipc",
    "lifetime",
    "process_settings",
    "signals",
    "spawn",
    "threads",
]
