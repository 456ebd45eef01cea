"""Tensors without data, and the price of an operator on them."""

from __future__ import annotations

from typing import Any

import torch

from distsim.kernels import Cost, Gpu

__all__ = ["meta", "priced"]


def meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    """A meta tensor: the model looks at shapes, strides, dtypes and devices only."""
    return torch.empty(shape, dtype=dtype, device="meta")


def priced(gpu: Gpu, func: Any, *args: Any, **kwargs: Any) -> Cost:
    """What the operator costs; its result is what torch's own meta kernel answers."""
    return gpu.cost(func, args, kwargs, func(*args, **kwargs))
