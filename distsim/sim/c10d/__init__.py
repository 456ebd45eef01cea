"""torch.distributed in virtual time: groups, works, stores, and the meeting of calls.

`group.py` has the groups that torch calls; `arrival.py` one member's part in a call, `communicator.py` the meeting
of a group's calls; `gpu_work.py` puts calls on GPU tensors into streams.
"""

from __future__ import annotations

__all__ = [
    "arrival",
    "backend",
    "communicator",
    "futures",
    "gpu_work",
    "group",
    "group_api",
    "operations",
    "refusals",
    "rendezvous",
    "stores",
    "symmetric_memory",
    "work",
]
