"""Prices matrix products, attention, norms, and the kernels of well-known packages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distsim.kernels.cost import Cost, OperatorCall, nbytes, tensors_in
from distsim.kernels.pricing import Attention, Gemm, Pricing, math_dtype, rule

# -- Matrix products: mm, addmm, bmm and their kin, fp8 products, grouped products, convolutions.


def _product(pricing: Pricing, call: OperatorCall, left: Any, right: Any) -> Cost:
    """Price a product of two- or three-dimensional operands, including other reads and writes of the operator."""
    batch = left.shape[0] if left.dim() == 3 else 1
    rows, inner = left.shape[-2], left.shape[-1] * _values_per_element(left)
    columns = right.shape[-1]
    gemm = Gemm(rows, columns, inner, batch, math_dtype(left.dtype), call.read + call.write)
    return pricing.gemm(gemm, rate=_alignment(pricing, gemm, left, right, columns))


_VECTOR = 16
"""Alignment in bytes that Tensor Core kernels need for the rows of their operands."""
_LEAST_UNALIGNED = 256
"""Number of rows, columns or inner elements below which alignment is ignored, because other limits apply."""


def _alignment(pricing: Pricing, gemm: Gemm, left: Any, right: Any, columns: int) -> float:
    """Return the speed relative to the same product with rows aligned to 16 bytes."""
    if min(gemm.m, gemm.n, gemm.k) < _LEAST_UNALIGNED or left.element_size() > 4:
        return 1.0
    pitches = (max(left.stride()[-2:]), max(right.stride()[-2:]), columns)
    aligned = all(pitch * left.element_size() % _VECTOR == 0 for pitch in pitches)
    return 1.0 if aligned else pricing.spec.gemm.unaligned


def _values_per_element(operand: Any) -> int:
    """Return numbers in an element of the tensor: two of four bits."""
    return 2 if operand.dtype == torch.float4_e2m1fn_x2 else 1


@rule("_scaled_mm", "_scaled_mm_v2")
def _scaled_product(pricing: Pricing, call: OperatorCall) -> Cost:
    _check_formats(pricing, call)
    return _product(pricing, call, call["self"], call["mat2"])


def _check_formats(pricing: Pricing, call: OperatorCall) -> None:
    """Refuse formats that the GPU's file has no peak for; scales of blocks came with fp4."""
    rates = pricing.spec.chip.flops
    scales = tuple(tensors_in(call["scale_a"]))
    needed = {math_dtype(call["self"].dtype)} | {"fp4" for scale in scales if scale.dtype == torch.float8_e8m0fnu}
    for dtype in sorted(needed - set(rates)):
        formats = f"{call['self'].dtype} with scales in {scales[0].dtype}"
        raise NotImplementedError(
            f"{call.name.removeprefix('aten::')} of {formats}: expected a GPU with {dtype} products, got "
            f"{pricing.spec.title}, which has {', '.join(rates)}; take another recipe, or a GPU that has them"
        )


@rule("mm", "bmm", "_int_mm")
def _two(pricing: Pricing, call: OperatorCall) -> Cost:
    return _product(pricing, call, call["self"], call["mat2"])


@rule("addmm", "addmm_", "_addmm_activation", "addbmm")
def _added(pricing: Pricing, call: OperatorCall) -> Cost:
    left = call["mat1"] if call["mat1"] is not None else call["batch1"]
    right = call["mat2"] if call["mat2"] is not None else call["batch2"]
    return _product(pricing, call, left, right)


@rule("baddbmm", "baddbmm_")
def _added_batch(pricing: Pricing, call: OperatorCall) -> Cost:
    return _product(pricing, call, call["batch1"], call["batch2"])


@rule("linear")
def _linear(pricing: Pricing, call: OperatorCall) -> Cost:
    given, weight = call["input"], call["weight"]
    rows = given.numel() // given.shape[-1]
    gemm = Gemm(rows, weight.shape[0], weight.shape[-1], 1, math_dtype(given.dtype), call.read + call.write)
    return pricing.gemm(gemm, rate=_alignment(pricing, gemm, given, weight, weight.shape[0]))


@rule("mv", "addmv", "addmv_", "dot", "vdot")
def _vector(pricing: Pricing, call: OperatorCall) -> Cost:
    moved = call.read + call.write
    flops = 2 * max(each.numel() for each in call.inputs)
    return pricing.bytes(moved, pricing.spec.memory.elementwise, "gemm", flops=flops)


@rule("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
def _grouped(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a grouped product. Groups are assumed to have equal size, because their sizes are values on the device."""
    if call["scale_a"] is not None:
        _check_formats(pricing, call)
    left, right, offsets = call["self"], call["mat2"], call["offs"]
    groups = offsets.numel() if offsets is not None else left.shape[0]
    rows, inner, columns = left.shape[-2], left.shape[-1] * _values_per_element(left), right.shape[-1]
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
def _convolution(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a convolution as its implicit product: output pixels x filters x filter size."""
    given = call["input"] if call["input"] is not None else call["self"]
    return _convolve(pricing, call, given, call["weight"], call.outputs[0], bool(call["transposed"]))


def _convolve(pricing: Pricing, call: OperatorCall, given: Any, weight: Any, output: Any, transposed: bool) -> Cost:
    groups = call["groups"] or max(1, given.shape[1] // weight.shape[1])  # depthwise ones do not say
    pixels = (given if transposed else output).numel() // (given if transposed else output).shape[1]
    gemm = Gemm(
        pixels,
        weight.shape[0] // groups,
        math.prod(weight.shape[1:]),
        groups,
        math_dtype(given.dtype, "conv"),
        nbytes((given, weight, output)),
    )
    return pricing.gemm(gemm, kind="conv", rate=pricing.spec.gemm.conv)


@rule("convolution_backward", "convolution_backward_overrideable")
def _convolution_backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price one product of the same size for each requested gradient, and a sum for the gradient of the bias."""
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


# -- Fused attention, forward and backward, by every name that PyTorch has for it.


def _kernel(name: str) -> str:
    for kernel in ("cudnn", "efficient"):
        if kernel in name:
            return kernel
    return "flash"


def _shape(call: OperatorCall) -> Attention:
    """Return the shape as batch, heads, length and dimension; attention_forward swaps heads and length, and packed
    sequences have no batch."""
    query, key, value = call["query"], call["key"], call["value"]
    backward = call.name.endswith("backward")
    causal = bool(call["is_causal"])
    if call["custom_mask_type"] is not None:
        causal = call["custom_mask_type"] != 0
    if call["causal"] is not None:
        causal = bool(call["causal"])
    fp32 = query.dtype == torch.float32
    if "scaled_dot_product" in call.name:
        queries, dim = query.shape[-2:]
        heads = query.shape[-3] if query.dim() > 2 else 1
        batch = math.prod(query.shape[:-3])
        return Attention(batch, heads, queries, key.shape[-2], dim, value.shape[-1], causal, backward, fp32)
    heads, dim = query.shape[-2], query.shape[-1]
    starts = _packed(call)
    if starts is not None:
        batch = max(1, starts.numel() - 1)
        queries, keys = _tokens(query) // batch, _tokens(key) // batch
    else:
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    return Attention(batch, heads, queries, keys, dim, value.shape[-1], causal, backward, fp32)


def _packed(call: OperatorCall) -> Any:
    """Return the starts of packed sequences, which are assumed to have equal length."""
    for name in ("cum_seq_q", "cu_seqlens_q", "cu_seqlens_q_", "seqstart_q"):
        result = call[name]
        if isinstance(result, torch.Tensor):
            return result
    return None


def _tokens(tensor: Any) -> int:
    return int(tensor.numel() // (tensor.shape[-1] * tensor.shape[-2]))


@rule(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_efficient_attention_forward",
    "_efficient_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_attention_backward",
)
def _fused(pricing: Pricing, call: OperatorCall) -> Cost:
    shape = _shape(call)
    kernel = _kernel(call.name)
    if "overrideable" in call.name:
        kernel = pricing.spec.attention.preferred
    tensors = [call[name] for name in ("query", "key", "value", "out", "grad_out", "grad_out_", "attn_bias", "bias")]
    return pricing.attention(shape, kernel, nbytes(tensors) + call.write)


@rule("scaled_dot_product_attention")
def _unresolved(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price `scaled_dot_product_attention` by the implementation that PyTorch would choose."""
    query = call["query"]
    plain = query.dtype in (torch.float16, torch.bfloat16) and call["attn_mask"] is None
    kernel = pricing.spec.attention.preferred if plain else "efficient"
    return pricing.attention(_shape(call), kernel, call.read + call.write)


# -- Norms, softmax and the losses on it.

_SHARED = 65_536
"""Bytes of a row from which softmax reads memory again in each of its passes."""


_WARP = 1024
"""Values of a row that one warp keeps in registers (PersistentSoftmax.cuh)."""


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _norm(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a norm that reads each row once and keeps it."""
    return pricing.bytes(call.read + call.write, pricing.spec.memory.norm, "norm")


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "cudnn_batch_norm",
    "native_group_norm",
    "batch_norm_stats",
    "batch_norm_elemt",
)
def _two_passes(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a norm with two passes: the statistics of each channel, then the values."""
    given = call["input"] if call["input"] is not None else call["self"]
    training = call["training"] if call["training"] is not None else call["train"]
    passes = 0 if training is False or call.name in ("aten::batch_norm_stats", "aten::batch_norm_elemt") else 1
    moved = call.read + call.write + passes * nbytes(given)
    return pricing.bytes(moved, pricing.spec.memory.norm, "norm", kernels=1 + passes)


@rule(
    "native_layer_norm_backward",
    "_fused_rms_norm_backward",
    "native_batch_norm_backward",
    "batch_norm_backward",
    "cudnn_batch_norm_backward",
    "native_group_norm_backward",
)
def _backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a norm's backward: the input's gradient by rows and, if there is a weight, its gradient by columns."""
    given = call["input"] if call["input"] is not None else call["self"]
    operands = nbytes(given)
    if call["weight"] is None and call.name in ("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward"):
        return pricing.bytes(3 * operands, pricing.spec.memory.norm, "norm")
    moved = 5 * operands
    cost = pricing.bytes(moved, pricing.spec.memory.elementwise, "norm", kernels=2)
    by_element = given.numel() / pricing.spec.memory.norm_backward + 2 * pricing.spec.memory.floor
    return Cost(max(cost.seconds, by_element), 2, 0, moved, "norm", cost.seconds >= by_element)


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def _softmax(pricing: Pricing, call: OperatorCall) -> Cost:
    memory = pricing.spec.memory
    return pricing.bytes(
        call.read + call.write, _rows(pricing, call["self"], call["dim"], memory.softmax_long), "softmax"
    )


def _rows(pricing: Pricing, given: Any, dim: int, long: float) -> float:
    """Return the bandwidth share of rows along *dim*; *long* rows do not fit into shared memory."""
    memory = pricing.spec.memory
    values = given.shape[dim] if given.dim() else 1
    if values <= _WARP:
        return memory.softmax_short
    return long if values * given.element_size() > _SHARED else memory.softmax


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price the backward of softmax like its forward (SoftMax.cu has a kernel per warp, one with rows in shared memory,
    and one without)."""
    efficiency = _rows(pricing, call["output"], call["dim"], pricing.spec.memory.softmax_backward)
    return pricing.bytes(call.read + call.write, efficiency, "softmax")


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss")
def _loss(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price a loss that reads one value per row, each in a 32-byte sector of its own."""
    moved = nbytes(call["target"]) * 5 + call.write
    return pricing.bytes(moved, pricing.spec.memory.gather, "reduction")


@rule("nll_loss_backward", "nll_loss2d_backward")
def _loss_backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price the gradient of such a loss: zeros everywhere, then one value per row."""
    zeros = pricing.bytes(call.write, pricing.spec.memory.elementwise, "elementwise")
    return zeros.plus(pricing.bytes(nbytes(call["target"]) * 5, pricing.spec.memory.gather, "index"))


# -- Kernels that well-known packages bring along, by the names of the operators that a program makes of them.


@rule("megatron::scaled_upper_triang_masked_softmax")
def _causal_softmax(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price Megatron-LM's causal softmax: one warp per row, which reads up to the diagonal and writes the whole row.

    Source: megatron/fused_kernels/scaled_upper_triang_masked_softmax.h.
    """
    moved = nbytes(call["scores"]) // 2 + call.write
    return pricing.bytes(moved, pricing.spec.memory.softmax_short, "softmax")


@rule("megatron::scaled_upper_triang_masked_softmax_backward")
def _causal_softmax_backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price the backward of Megatron-LM's causal softmax, which reads gradient and output."""
    return pricing.bytes(call.read // 2 + call.write, pricing.spec.memory.softmax_short, "softmax")


@rule("xentropy::forward")
def _cross_entropy(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price the cross entropy of apex and flash-attn: each row is read for its largest logit and again for the sum."""
    moved = nbytes(call["logits"]) + call.read + call.write
    return pricing.bytes(moved, pricing.spec.memory.elementwise, "softmax")


@rule("xentropy::backward")
def _cross_entropy_backward(pricing: Pricing, call: OperatorCall) -> Cost:
    """Price the backward of the cross entropy, which reads the logits and writes their gradient."""
    return pricing.bytes(call.read + call.write, pricing.spec.memory.elementwise, "softmax")


# -- Kernels of libraries that only a GPU machine has (`distsim/libraries`).

TRITON_NORM_16_BITS = 1.4
"""Speed of a norm's backward kernel of Triton in 16 bits, relative to torch's; in float32 it is as fast.

Source: linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv at ead96b6, H100: layer_norm in float32 101 to 116
billion elements a second, megatron_rms_norm in bf16 147, torch's 104 in both.
"""


@dataclass(frozen=True, slots=True)
class KnownKernel:
    """Price of a library's Triton kernel, whose launch says no more than its tensors."""

    kind: str = "custom"
    passes: float = 1.0
    """How often it reads or writes its tensors, on average."""


def library_kernel(name: str) -> None:
    """Price the operator *name* (`library::kernel`), whose arguments say what it does.

    Its schema is `(Tensor[] read, Tensor(a!)[] written, int flops, str kind, int kernels, str dtype, int[] shape)`.
    """
    rule(name)(_library_kernel)


def _library_kernel(pricing: Pricing, call: OperatorCall) -> Cost:
    tensors = [*call["read"], *call["written"]]
    return library_cost(
        pricing,
        call["kind"],
        tensors,
        nbytes(tensors),
        kernels=call["kernels"],
        flops=call["flops"],
        dtype=call["dtype"],
        shape=call["shape"],
    )


def library_cost(
    pricing: Pricing,
    kind: str,
    tensors: Sequence[Any],
    moved: int,
    *,
    kernels: int = 1,
    flops: int = 0,
    dtype: str = "",
    shape: Sequence[int] = (),
) -> Cost:
    """Return the cost of a library's kernel.

    Args:
        pricing: Prices of the GPU.
        kind: Kind of kernel in reports; `norm backward`: Triton's kernel for the gradients of a norm.
        tensors: Tensors that it reads or writes.
        moved: Bytes that it reads or writes.
        kernels: Number of kernels, one after the other.
        flops: Floating-point operations, which take their time if it is longer than that of the bytes.
        dtype: Data type in which they are computed; empty: that of the first tensor.
        shape: Rows, columns, inner dimension and number of matrix products (kind `gemm`), or the fields of `Attention`
            (kind `attention`), which take the time of these.
    """
    memory, dtype = pricing.spec.memory, dtype or math_dtype(tensors[0].dtype)
    if kind == "attention":
        batch, heads, queries, keys, dim, value_dim, causal, backward = shape
        call = Attention(batch, heads, queries, keys, dim, value_dim, bool(causal), bool(backward))
        return pricing.attention(call, "flash", moved)
    if shape:
        m, n, k, batch = shape
        gemm = Gemm(m, n, k, batch, dtype, moved)
        return pricing.gemm(gemm, kind=kind, rate=pricing.spec.gemm.grouped if batch > 1 else 1.0)
    if kind == "norm backward":
        numel = max(t.numel() for t in tensors)
        size = min(t.element_size() for t in tensors if t.numel() == numel)
        cost = pricing.bytes(moved, memory.elementwise, "norm", kernels=kernels)
        limit_s = numel / (memory.norm_backward * (TRITON_NORM_16_BITS if size == 2 else 1.0)) + 2 * memory.floor
        return replace(cost, seconds=max(cost.seconds, limit_s))
    cost = pricing.bytes(moved, memory.elementwise, kind, kernels=kernels, flops=flops)
    rate = pricing.spec.chip.peak(dtype) * pricing.spec.gemm.sustained(dtype)
    math_s = kernels * memory.floor + (kernels - 1) * pricing.spec.host.gap + flops / rate
    return replace(cost, seconds=max(cost.seconds, math_s), memory_bound=cost.seconds >= math_s)
