"""Matrix products: mm, addmm, bmm and their kin, fp8 products, grouped products, convolutions."""

from __future__ import annotations

import math
from typing import Any

from distsim.kernels.call import Call, nbytes
from distsim.kernels.cost import Cost
from distsim.kernels.gemm import Gemm
from distsim.kernels.pricing import Pricing, math_dtype
from distsim.kernels.rules.registry import rule

__all__: list[str] = []


def _product(pricing: Pricing, call: Call, left: Any, right: Any) -> Cost:
    """Of two or three dimensions, whatever else the operator reads or writes beside."""
    batch = left.shape[0] if left.dim() == 3 else 1
    rows, inner = left.shape[-2], left.shape[-1]
    columns = right.shape[-1]
    moved = call.read + call.write
    return pricing.gemm(Gemm(rows, columns, inner, batch, math_dtype(left.dtype), moved))


@rule("mm", "bmm", "_int_mm", "_scaled_mm")
def _two(pricing: Pricing, call: Call) -> Cost:
    return _product(pricing, call, call["self"], call["mat2"])


@rule("addmm", "addmm_", "_addmm_activation", "addbmm")
def _added(pricing: Pricing, call: Call) -> Cost:
    left = call["mat1"] if call["mat1"] is not None else call["batch1"]
    right = call["mat2"] if call["mat2"] is not None else call["batch2"]
    return _product(pricing, call, left, right)


@rule("baddbmm", "baddbmm_")
def _added_batch(pricing: Pricing, call: Call) -> Cost:
    return _product(pricing, call, call["batch1"], call["batch2"])


@rule("linear")
def _linear(pricing: Pricing, call: Call) -> Cost:
    given, weight = call["input"], call["weight"]
    rows = given.numel() // given.shape[-1]
    gemm = Gemm(rows, weight.shape[0], weight.shape[-1], 1, math_dtype(given.dtype), call.read + call.write)
    return pricing.gemm(gemm)


@rule("mv", "addmv", "addmv_", "dot", "vdot")
def _vector(pricing: Pricing, call: Call) -> Cost:
    moved = call.read + call.write
    flops = 2 * max(each.numel() for each in call.inputs)
    return pricing.bytes(moved, pricing.spec.memory.elementwise, "gemm", flops=flops)


@rule("_grouped_mm", "_scaled_grouped_mm")
def _grouped(pricing: Pricing, call: Call) -> Cost:
    """Groups are taken to be of one size: their sizes are values on the device."""
    left, right, offsets = call["self"], call["mat2"], call["offs"]
    groups = offsets.numel() if offsets is not None else left.shape[0]
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        inner = -(-inner // groups)
    elif left.dim() == 2:
        rows = -(-rows // groups)
    elif right.dim() == 2:
        columns = -(-columns // groups)
    gemm = Gemm(rows, columns, inner, groups, math_dtype(left.dtype), call.read + call.write)
    return pricing.gemm(gemm, rate=pricing.spec.gemm.grouped)


@rule("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "miopen_convolution")
@rule("_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d")
def _convolution(pricing: Pricing, call: Call) -> Cost:
    """As the implicit product that it is: pixels of the output by filters by what a filter sees."""
    given = call["input"] if call["input"] is not None else call["self"]
    return _convolve(pricing, call, given, call["weight"], call.outputs[0], bool(call["transposed"]))


def _convolve(pricing: Pricing, call: Call, given: Any, weight: Any, output: Any, transposed: bool) -> Cost:
    groups = call["groups"] or max(1, given.shape[1] // weight.shape[1])  # depthwise ones do not say
    pixels = (given if transposed else output).numel() // (given if transposed else output).shape[1]
    gemm = Gemm(
        pixels,
        weight.shape[0] // groups,
        math.prod(weight.shape[1:]),
        groups,
        _conv_dtype(given.dtype),
        nbytes((given, weight, output)),
    )
    return pricing.gemm(gemm, kind="conv", rate=pricing.spec.gemm.conv)


def _conv_dtype(dtype: Any) -> str:
    """cuDNN's convolutions take tf32 unless they are told not to."""
    import torch

    if dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32":
        return "tf32"
    return math_dtype(dtype)


@rule("convolution_backward", "convolution_backward_overrideable")
def _convolution_backward(pricing: Pricing, call: Call) -> Cost:
    """A product of the same size for each gradient that is asked for; the bias's is a sum."""
    output = call["grad_output"]
    given, weight = call["input"], call["weight"]
    mask = call["output_mask"]
    one = _convolve(pricing, call, given, weight, output, bool(call["transposed"]))
    total: Cost | None = None
    for wanted in mask[:2]:
        if wanted:
            total = one if total is None else total.plus(one)
    if mask[2]:
        bias = pricing.bytes(nbytes(output), pricing.spec.memory.reduction, "reduction")
        total = bias if total is None else total.plus(bias)
    return total if total is not None else pricing.bytes(0, 1.0, "none", kernels=0)
