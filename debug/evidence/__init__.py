"""Where evidence comes from: rings and /proc of living ranks, dumps, stacks, what guards noted.

`processes.py` says which rank each process is, `rank_state.py` where it stands and what it called; everything ends in
an `Evidence` of `records`.
"""

from __future__ import annotations

__all__ = [
    "from_dumps",
    "guard_findings",
    "guard_flags",
    "processes",
    "procfs",
    "rank_state",
    "stack_capture",
    "watched_source",
]
