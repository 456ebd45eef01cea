"""Which algorithm a library takes for a call, and what its software costs beyond the links.

`nccl.py` with its own cost model (RCCL's: `rccl_tuning.py`), `gloo.py`, `mpi.py`, and `ideal.py` for closed forms.
"""

from __future__ import annotations

__all__ = [
    "gloo",
    "ideal",
    "mpi",
    "nccl",
    "nccl_channels",
    "nccl_settings",
    "nccl_timing",
    "nccl_tuning",
    "nccl_versions",
    "rccl_tuning",
    "sockets",
]
