"""Devices of a rank: the CPU, whose operators run and are priced, and simulated GPUs, whose operators are only
priced.

Start with `dispatch.py`, through which every operator passes. `cpu.py` prices host operators by the cluster file's
CPU. A GPU (`gpu.py`) has streams in virtual time (`timeline`), PyTorch's allocator (`allocator`), and tensors
without data, which `hooks.py` makes torch accept; `operators` computes the results of an operator; `cuda_api` is
torch.cuda.
"""

from __future__ import annotations

__all__ = [
    "allocator",
    "cpu",
    "cuda_api",
    "dispatch",
    "generator",
    "gpu",
    "hooks",
    "memory",
    "nvidia_smi",
    "operators",
    "timeline",
]
