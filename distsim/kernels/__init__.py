"""Cost of an operator on a GPU in seconds, kernels, flops and bytes.

Start with `Gpu.named("h100").cost(func, args, kwargs, result)` in `gpu.py`. `rules/` has a rule for each kind of
operator, and `gpus/` a data file for each GPU.
"""

from __future__ import annotations

from distsim.kernels.cost import NOTHING, Cost
from distsim.kernels.gpu import Gpu, kernel_cost
from distsim.kernels.rules.compute_bound import KnownKernel, library_kernel

__all__ = ["NOTHING", "Cost", "Gpu", "KnownKernel", "kernel_cost", "library_kernel"]
