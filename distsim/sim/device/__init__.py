"""What a rank computes on: the CPU, whose operators are run and charged, and simulated GPUs, whose are only charged.

Start with `dispatch.py`, where every operator passes. `cpu.py` prices those of the host by the cluster file's CPU. A
GPU (`gpu.py`) has streams in virtual time (`timeline.py`), PyTorch's allocator (`allocator.py`) and tensors without
data, which `hooks.py` lets torch accept; `operators` says what comes out of an operator;
`cuda_api` is torch.cuda.
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
