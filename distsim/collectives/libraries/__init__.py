"""Choices of the communication libraries, and their software costs beyond the links.

`nccl.py` has NCCL's own cost model (RCCL's: `rccl_tuning.py`), `gloo.py` gloo and MPI, and `symmetric.py`
torch's kernels on symmetric memory.
"""

from __future__ import annotations

__all__ = [
    "gloo",
    "nccl",
    "nccl_channels",
    "nccl_timing",
    "nccl_tuning",
    "rccl_tuning",
    "symmetric",
]
