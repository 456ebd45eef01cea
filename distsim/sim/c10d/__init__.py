"""torch.distributed in virtual time: groups, works, stores, and where calls meet.

`group` is what torch calls; `communicator.py` is where the calls of a group meet; `on_gpu` puts those of tensors on a
simulated GPU into streams.
"""

from __future__ import annotations

__all__ = [
    "arrival",
    "backend",
    "buffers",
    "communicator",
    "data",
    "group",
    "monitored_barrier",
    "nccl_class",
    "on_gpu",
    "operations",
    "refusals",
    "stores",
    "work",
]
