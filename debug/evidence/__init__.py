"""Where evidence comes from: rings and /proc of living ranks, dumps, stacks, what guards noted.

`rank_state.py` is where each rank stands, `call_records.py` what it called; everything ends in an
`Evidence` of `records`.
"""

from __future__ import annotations

__all__ = [
    "call_records",
    "forked_calls",
    "from_dumps",
    "guard_findings",
    "guard_flags",
    "plain_pickle",
    "procfs",
    "rank_state",
    "stack_capture",
    "typed",
]
