"""Collects evidence: from rings and /proc of living ranks, dumps, stacks, and notes of guards.

`processes.py` finds the rank of each process, and `rank_state.py` its state and calls; all modules produce an
`Evidence` of `records`.
"""

from __future__ import annotations

__all__ = [
    "from_dumps",
    "from_inspector",
    "guard_findings",
    "guard_flags",
    "processes",
    "rank_state",
    "watched_source",
]
