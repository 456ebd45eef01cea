"""From evidence to diagnoses, root cause first. Pure: no I/O, no clock; `silent.collect` alone imports torch.

Read `diagnose.py`; each other module answers for one family of faults.
"""

from __future__ import annotations

__all__ = [
    "absence",
    "causes",
    "context",
    "contradiction",
    "deadlock",
    "deaths",
    "diagnose",
    "point_to_point",
    "ranking",
    "remote_calls",
    "silent",
    "stragglers",
    "waits",
]
