"""torch.distributed in virtual time: groups, works, stores, and where calls meet.

`group.py` is what torch calls; `communicator.py` is where the calls of a group meet.
"""

from __future__ import annotations

__all__ = [
    "backend",
    "buffers",
    "communicator",
    "data",
    "group",
    "monitored_barrier",
    "operations",
    "refusals",
    "stores",
    "work",
]
