"""Diagnoses evidence, root cause first. Pure: no I/O, no clock; only `silent.collect` imports torch.

Start with `diagnose.py` and `explain.py`; each other module handles one family of faults.
"""

from __future__ import annotations

__all__ = [
    "absence",
    "causes",
    "context",
    "contradiction",
    "deadlock",
    "diagnose",
    "explain",
    "pace",
    "point_to_point",
    "ranking",
    "silent",
    "stragglers",
    "waits",
]
