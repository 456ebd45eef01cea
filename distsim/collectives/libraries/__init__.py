"""Which algorithm a library takes for a call, and what its software costs beyond the links.

`nccl.py` with its own cost model (RCCL's: `rccl_tuning.py`), `gloo.py` with MPI, and `ideal.py` for closed forms.
"""

from __future__ import annotations

__all__ = [
    "gloo",
    "ideal",
    "nccl",
    "nccl_channels",
    "nccl_timing",
    "nccl_tuning",
    "rccl_tuning",
]
