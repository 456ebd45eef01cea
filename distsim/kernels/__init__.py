"""What an operator costs on a GPU: seconds, kernels, flops, bytes; a pure model on one data file a GPU (gpus/*.toml).

Begin with `gpu.py`: `Gpu.named("h100").cost(func, args, kwargs, result)`. `rules/` says what each operator does.
"""

from __future__ import annotations

from distsim.kernels.cost import NOTHING, Cost
from distsim.kernels.gpu import Gpu, kernel_cost

__all__ = ["NOTHING", "Cost", "Gpu", "kernel_cost"]
