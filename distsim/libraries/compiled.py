"""Compiled extensions of libraries whose own Python runs: each function launches a kernel with a price.

Source of names and arguments: flash_attn 2.8.3 (csrc/flash_attn, rotary, xentropy, layer_norm), causal_conv1d 1.7.0,
mamba_ssm 2.3.2 (csrc/selective_scan), megablocks 0.10.0 (csrc).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.kernels.pricing import rule
from distsim.kernels.rules.memory_bound import default
from distsim.libraries.fused import launch, needs_values, note, refuse_values
from distsim.torch_compat.device import aten

_NO_VALUES = "its values are not computed"

# -- flash_attn_2_cuda. Sequences of different lengths are priced as if all had the same length.


def _prepare(call: str, causal: bool, left: int, right: int, softcap: float, slopes: Tensor | None) -> None:
    """Report what the price leaves out, and refuse it if the run computes values."""
    if (left, right) not in ((-1, -1), (-1, 0)):
        refuse_values(call, "a sliding window is priced as if it were whole")
        note(f"{call}: a sliding window is priced as attention without one")
    if softcap or slopes is not None:
        refuse_values(call, "its bias is left out")


def _shape(q: Tensor, k: Tensor, causal: bool, starts: Tensor | None = None, longest: int = 0) -> tuple[int, ...]:
    """Return the fields of `distsim.kernels.pricing.Attention`.

    Args:
        q: Queries (batch, length, heads, dim), or packed ones (tokens, heads, dim).
        k: Keys, likewise.
        causal: Whether a query sees no later keys.
        starts: Start of each packed sequence, and the end of the last.
        longest: Length of the longest packed sequence; 0 if it is unknown.
    """
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    if starts is not None:
        batch = max(1, q.shape[0] // longest if longest else starts.numel() - 1)
        queries, keys = q.shape[0] // batch, k.shape[0] // batch
    return batch, q.shape[-2], queries, keys, q.shape[-1], k.shape[-1], causal, False


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, rows: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Launch the forward kernel; *rows* is the shape of the logarithms of the sums of exponents."""
    out = torch.empty_like(q) if out is None else out
    sums = torch.empty(rows, dtype=torch.float32, device=q.device)
    launch("flash_attn::attention", [q, k, v], [out, sums], kind="attention", shape=shape)
    return out, sums, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    slopes: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    *rest: Any,
) -> Any:
    _prepare("flash_attn_func", causal, left, right, softcap, slopes)
    if needs_values():
        four = [t.transpose(1, 2) for t in (q, k, v)]
        done, sums = aten._scaled_dot_product_flash_attention_for_cpu(*four, dropout, causal, scale=scale)
        return done.transpose(1, 2), sums, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)
    rows = q.shape[0], q.shape[2], q.shape[1]
    return _attend(q, k, v, out, rows, _shape(q, k, causal))


def _varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    starts: Tensor,
    key_starts: Tensor,
    used: Any,
    padding: Any,
    table: Any,
    slopes: Any,
    longest: int,
    longest_key: int,
    dropout: float,
    scale: float,
    zero: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    *rest: Any,
) -> Any:
    _prepare("flash_attn_varlen_func", causal, left, right, softcap, slopes)
    refuse_values("flash_attn_varlen_func", "sequences are taken to have one length")
    return _attend(q, k, v, out, (q.shape[1], q.shape[0]), _shape(q, k, causal, starts, longest))


def _differentiate(read: list[Tensor], grads: list[Tensor | None], shape: tuple[int, ...]) -> list[Tensor]:
    """Launch the backward kernel, which writes *grads*; *read* begins with the output's gradient, q, k and v."""
    given = [torch.empty_like(t) if grad is None else grad for grad, t in zip(grads, read[1:], strict=False)]
    launch("flash_attn::attention_backward", read, given, kind="attention", shape=(*shape[:-1], True))
    return [*given, read[5].new_empty(read[5].shape)]


def _bwd(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    dq: Any,
    dk: Any,
    dv: Any,
    slopes: Any,
    dropout: float,
    scale: float,
    causal: bool,
    *rest: Any,
) -> list[Tensor]:
    if needs_values():
        five = [t.transpose(1, 2) for t in (grad, q, k, v, out)]
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for given, result in zip((dq, dk, dv), backward(*five, sums, dropout, causal, scale=scale), strict=True):
            given.copy_(result.transpose(1, 2))
        return [dq, dk, dv, sums]
    return _differentiate([grad, q, k, v, out, sums], [dq, dk, dv], _shape(q, k, causal))


def _varlen_bwd(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    dq: Any,
    dk: Any,
    dv: Any,
    starts: Tensor,
    key_starts: Tensor,
    slopes: Any,
    longest: int,
    longest_key: int,
    dropout: float,
    scale: float,
    zero: bool,
    causal: bool,
    *rest: Any,
) -> list[Tensor]:
    return _differentiate([grad, q, k, v, out, sums], [dq, dk, dv], _shape(q, k, causal, starts, longest))


def _fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any,
    v: Any,
    used: Any,
    cos: Any,
    sin: Any,
    rows: Any,
    padding: Any,
    table: Tensor | None,
    slopes: Any,
    out: Any,
    scale: float,
    causal: bool,
    *rest: Any,
) -> Any:
    """Attention over the whole cache, as if it were full."""
    refuse_values("flash_attn_with_kvcache", "the cache is taken to be full")
    pages = 1 if table is None else table.shape[1]
    shape = list(_shape(q, k_cache, causal))
    shape[3] *= pages
    return _attend(q, k_cache, v_cache, out, (q.shape[0], q.shape[2], q.shape[1]), tuple(shape))[:2]


# -- rotary_emb, xentropy_cuda_lib, dropout_layer_norm: which programs call within autograd functions of their own.


def _apply_rotary(
    x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conj: bool = False
) -> None:
    refuse_values("rotary_emb.apply_rotary", _NO_VALUES)
    launch("flash_attn::rotary", [x1, x2, cos, sin], [out1, out2], triton=True)


def _xentropy_forward(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, total_classes: int = -1
) -> tuple[Tensor, Tensor]:
    refuse_values("xentropy_cuda_lib.forward", _NO_VALUES)
    losses, sums = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    launch("flash_attn::xentropy", [logits, labels], [losses, sums], kind="softmax")
    return losses, sums


def _xentropy_backward(
    grad: Tensor,
    logits: Tensor,
    sums: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    inplace: bool = False,
    total_classes: int = -1,
) -> Tensor:
    out = logits if inplace else torch.empty_like(logits)
    launch("flash_attn::xentropy_backward", [grad, logits, sums, labels], [out], kind="softmax")
    return out


def _norm_forward(
    x0: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    out_subset: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale_const: float,
    out_rows: int,
    generator: Any = None,
    residual_in_fp32: bool = False,
    rms: bool = False,
) -> list[Tensor | None]:
    """dropout_layer_norm.dropout_add_ln_fwd: the output, the sum with the residual, the mask, mean and deviation."""
    refuse_values("dropout_layer_norm", _NO_VALUES)
    if x0_subset is not None or out_subset is not None:
        raise NotSimulated("dropout_layer_norm on a subset of rows", "call it without x0_subset and out_subset")
    dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x0.dtype
    scales = rowscale is not None or colscale is not None
    keeps = residual is not None or dropout_p > 0 or scales or dtype != x0.dtype
    total = torch.empty_like(x0, dtype=dtype) if keeps else None
    mask = torch.empty_like(x0, dtype=torch.uint8) if dropout_p > 0 else None
    mean, deviation = (torch.empty(x0.shape[0], dtype=torch.float32, device=x0.device) for _ in range(2))
    out = [torch.empty_like(x0), total, mask, mean, deviation]
    launch("flash_attn::layer_norm", [x0, residual, gamma, beta, rowscale, colscale], out, kind="norm", triton=True)
    return out


def _norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    x0: Tensor | None,
    mask: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    gamma: Tensor,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    out_subset: Tensor | None,
    dropout_p: float,
    rowscale_const: float,
    x0_rows: int,
    has_residual: bool,
    rms: bool = False,
) -> list[Tensor | None]:
    read = [grad, grad_total, total, x0, mask, mean, deviation, gamma, rowscale, colscale]
    weights = [torch.empty_like(gamma) for _ in range(2 if colscale is None else 3)]
    of_residual = torch.empty_like(total) if has_residual else None
    out = [torch.empty_like(grad), of_residual, *weights[:2]]
    written = [*out, *weights[2:]]
    launch("flash_attn::layer_norm_backward", read, written, kind="norm backward", kernels=2, triton=True)
    return [*out, None, None, *weights[2:]]


# -- causal_conv1d_cuda, selective_scan_cuda


def _conv_fwd(
    x: Tensor, weight: Tensor, bias: Any, numbers: Any, initial: Any, out: Tensor, final: Any, *rest: Any
) -> None:
    refuse_values("causal_conv1d", _NO_VALUES)
    launch("causal_conv1d::forward", [x, weight, bias, numbers, initial], [out, final])


def _conv_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    grad: Tensor,
    numbers: Any,
    initial: Any,
    grad_final: Any,
    dx: Tensor,
    dweight: Tensor,
    dbias: Any,
    dinitial: Any,
    silu: bool,
) -> None:
    launch("causal_conv1d::backward", [x, weight, bias, grad, numbers], [dx, dweight, dbias, dinitial])


_SCAN_FLOPS = 32
"""Slots of an fp32 multiply-add, times two, for each element and state of selective_scan: an exponential takes 8 (16 a
cycle and multiprocessor where multiply-adds are 128), the recurrence and its output as many."""
_SCAN_CHUNK = 2048
"""Positions after which the kernel stores its states."""


def _scan_fwd(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any, z: Any, bias: Any, softplus: bool
) -> list[Tensor]:
    refuse_values("mamba_ssm's selective_scan", _NO_VALUES)
    chunks = -(-u.shape[2] // _SCAN_CHUNK)
    states = torch.empty(*u.shape[:2], chunks, 2 * A.shape[1], dtype=torch.float32, device=u.device)
    out = [torch.empty_like(delta), states, *([] if z is None else [torch.empty_like(z)])]
    flops = _SCAN_FLOPS * u.numel() * A.shape[1]
    launch("mamba_ssm::selective_scan", [u, delta, A, B, C, D, z, bias], out, flops=flops, dtype="fp32")
    return out


def _scan_bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any,
    z: Any,
    bias: Any,
    grad: Tensor,
    states: Tensor,
    out: Any,
    dz: Any,
    softplus: bool,
    recompute: bool,
) -> list[Tensor | None]:
    given = [None if t is None else torch.empty_like(t) for t in (u, delta, A, B, C, D, bias)]
    if z is not None:
        given.append(torch.empty_like(z) if dz is None else dz)
    given += [torch.empty_like(z)] if recompute else []
    read, flops = [u, delta, A, B, C, D, z, bias, grad, states, out], 5 * _SCAN_FLOPS * u.numel() * A.shape[1] // 2
    launch("mamba_ssm::selective_scan_backward", read, given, flops=flops, dtype="fp32")
    return given


# -- megablocks_ops. Each expert is taken to get equally many tokens.


def _sort(x: Tensor, bits: int, values: Tensor, indices: Tensor) -> None:
    refuse_values("megablocks.ops.sort", _NO_VALUES)
    launch("megablocks::sort", [x], [values, indices])


def _histogram(x: Tensor, count: int) -> Tensor:
    note("megablocks: each expert is taken to get equally many tokens")
    even = torch.full((count,), x.numel() // count, dtype=torch.int32, device=x.device)
    even[: x.numel() % count] += 1
    return even


# -- bitsandbytes, whose kernels are operators of torch.library with shapes of their own

for _operator in (
    "optimizer_update_8bit_blockwise",
    "optimizer_update_32bit",
    "quantize_blockwise",
    "dequantize_blockwise",
    "quantize_4bit",
    "dequantize_4bit",
    "gemv_4bit",
    "int8_vectorwise_quant",
    "int8_double_quant",
    "int8_mm_dequant",
):
    rule(f"bitsandbytes::{_operator}")(default)

PAGED: dict[str, Any] = {
    "get_paged": lambda *shape, dtype=torch.float32, device=None: torch.empty(shape, dtype=dtype, device=device),
    "fill": lambda x, value, *options: x.fill_(value),
    "prefetch_tensor": lambda x, to_cpu=False: None,
}
"""Functions of bitsandbytes.functional for memory that moves between host and GPU."""

MODULES: dict[str, dict[str, Any]] = {
    "flash_attn_2_cuda": {
        "fwd": _fwd,
        "varlen_fwd": _varlen_fwd,
        "bwd": _bwd,
        "varlen_bwd": _varlen_bwd,
        "fwd_kvcache": _fwd_kvcache,
    },
    "rotary_emb": {"apply_rotary": _apply_rotary},
    "xentropy_cuda_lib": {"forward": _xentropy_forward, "backward": _xentropy_backward},
    "dropout_layer_norm": {"dropout_add_ln_fwd": _norm_forward, "dropout_add_ln_bwd": _norm_backward},
    "causal_conv1d_cuda": {"causal_conv1d_fwd": _conv_fwd, "causal_conv1d_bwd": _conv_bwd},
    "selective_scan_cuda": {"fwd": _scan_fwd, "bwd": _scan_bwd},
    "megablocks_ops": {
        "sort": _sort,
        "histogram": _histogram,
        "inclusive_cumsum": lambda x, dim, out: out.copy_(x.cumsum(dim)),
        "replicate_forward": lambda x, bins, out: launch("megablocks::replicate", [x, bins], [out]),
    },
}
