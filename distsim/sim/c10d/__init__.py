"""torch.distributed in virtual time: groups, works, stores, and the meeting of calls.

`group.py` has the groups that torch calls; `work.py` one member's part in a call and its handle, `communicator.py` the
meeting of a group's calls, `operations.py` what each does; `gpu_work.py` puts calls on GPU tensors into streams.
"""

from __future__ import annotations

__all__ = [
    "backend",
    "communicator",
    "extensions",
    "futures",
    "gpu_values",
    "gpu_work",
    "group",
    "group_api",
    "operations",
    "refusals",
    "rendezvous",
    "stores",
    "work",
]
