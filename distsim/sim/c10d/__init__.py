"""torch.distributed in virtual time: groups, works, stores, and where calls meet.

`group.py` is what torch calls; `arrival.py` one member's part in a call, `communicator.py` where the calls of a group
meet; `gpu_work.py` puts those of tensors on a simulated GPU into streams.
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
    "work",
]
