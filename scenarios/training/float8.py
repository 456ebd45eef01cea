"""Linear layers whose three products take 8-bit operands, scaled anew at each call (`torch._scaled_mm`).

One scale a tensor (tensorwise), one a row of each operand (rowwise), or one for each 32 elements along the inner
dimension (mxfp8, in the layout that Blackwell's tensor cores read).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (8, 9), "mxfp8": (10, 0)}
LARGEST = 448.0  # of float8_e4m3fn
GROUP = 32


class _Product(Function):
    """x [n, k] @ weight [m, k].T, and both gradients, from operands scaled along each product's inner dimension.

    As torchao's, it keeps operands in 16 bits and casts them once more in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return product(x, weight, recipe)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        return product(dy, weight.t(), ctx.recipe), product(dy.t(), x.t(), ctx.recipe), None


class _TensorwiseProduct(Function):
    """The same from operands with one scale each, which hold for every product: torchao keeps those in 8 bits, and
    turns them around where the inner dimension has to lie in rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x8, weight8 = scaled(x, "tensorwise"), scaled(weight, "tensorwise")
        ctx.save_for_backward(*x8, *weight8)
        return multiplied(x8, weight8, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        dy8, dy_scale = scaled(dy.contiguous(), "tensorwise")
        turned, columns = dy8.t().contiguous(), x.t().contiguous()
        dx = multiplied((dy8, dy_scale), (weight.t().contiguous(), weight_scale), dy.dtype)
        return dx, multiplied((turned, dy_scale), (columns, x_scale), dy.dtype)


Operand = tuple[torch.Tensor, torch.Tensor]
"""A tensor in 8 bits, and what to multiply it by."""


def product(left: torch.Tensor, right: torch.Tensor, recipe: str) -> torch.Tensor:
    """left [n, k] @ right [m, k].T in the type of *left*; both are scaled along k."""
    a, (b, b_scale) = scaled(left, recipe), scaled(right, recipe)
    b_scale = b_scale.t() if recipe == "rowwise" else b_scale
    return multiplied(a, (b, b_scale), left.dtype, fast=recipe != "mxfp8")


def multiplied(left: Operand, right: Operand, dtype: torch.dtype, fast: bool = True) -> torch.Tensor:
    """left [n, k] @ right [m, k].T."""
    (a, a_scale), (b, b_scale) = left, right
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def scaled(x: torch.Tensor, recipe: str) -> Operand:
    """*x* [n, k] in 8 bits, row after row, and what to multiply it by."""
    if recipe == "mxfp8":
        return _in_groups(x)
    over = {"dim": -1, "keepdim": True} if recipe == "rowwise" else {}
    peak = torch.linalg.vector_norm(x, float("inf"), **over)
    scale = (peak.float() / LARGEST).clamp(min=1e-12)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous(), scale


def _in_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two, in tiles of 128 rows and 4 groups as cuBLAS reads them (cuBLAS documentation, 3.1.4.3.2)."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    exponent = groups.abs().amax(-1).clamp(min=2.0**-120).log2().floor() - 8  # the largest is below 2 ** 9
    values = (groups * (-exponent).exp2()[..., None]).clamp(-LARGEST, LARGEST)
    rows, columns = -(-exponent.shape[0] // 128) * 128, -(-exponent.shape[1] // 4) * 4
    whole = F.pad(exponent.exp2(), (0, columns - exponent.shape[1], 0, rows - exponent.shape[0]), value=1.0)
    tiles = whole.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    scale = tiles.reshape(-1).to(torch.float8_e8m0fnu)
    return values.flatten(-2).to(torch.float8_e4m3fn).contiguous(), scale


def linear(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
    """x [..., k] @ weight [m, k].T."""
    rows = x.flatten(0, -2)
    if recipe == "tensorwise":
        return _TensorwiseProduct.apply(rows, weight).unflatten(0, x.shape[:-1])
    return _Product.apply(rows, weight, recipe).unflatten(0, x.shape[:-1])


class Linear(nn.Linear):
    """Without bias; *recipe* is the key of LEAST_CAPABILITY."""

    recipe = "tensorwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.recipe)


def lacks(device: torch.device, recipe: str) -> str | None:
    """Why *device* cannot multiply so."""
    least = LEAST_CAPABILITY[recipe]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= least:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    return f"--fp8 {recipe}: {name} has no such products; it takes compute capability {least[0]}.{least[1]} or more"


def convert(model: nn.Module, recipe: str) -> None:
    """Have all linear layers within *model* multiply in 8 bits."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
            module.recipe = recipe
