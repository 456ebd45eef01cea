"""The process beside the ranks of a host that reads their rings and reports what is wrong.

`loop.py` is its life; `host.py` what it sees; `peers/` is how monitors of several hosts act as one; `ends/` how ranks
are ended.
"""

from __future__ import annotations

__all__ = [
    "activity",
    "ask",
    "ends",
    "host",
    "loop",
    "peers",
    "pool",
    "silent_search",
    "start",
    "steady",
    "straggler_watch",
    "suspicions",
]
