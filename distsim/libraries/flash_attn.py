"""Functions of flash_attn 2.8 and of flash_attn_interface (FlashAttention-3) for a machine without them.

They are those that programs call most. With the library's own Python installed, compiled.py has its kernels.

Source of names and arguments: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py at v2.8.3, hopper/.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from distsim.libraries.fused import FusedKernel, fused, fused_outputs, launch, needs_values, note, refuse_values

FA2, FA3 = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
"""The kernels of torch that have their speed: FlashAttention-2 is in torch, cuDNN's is as fast as FlashAttention-3
(arXiv:2407.08608, figure 5)."""


def attend(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    dropout: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    bias: Any = None,
    kernel: SDPBackend | None = None,
) -> Tensor:
    """Return the attention of q (batch, queries, heads, dim) over k and v (batch, keys, heads of keys, dim), by torch's
    *kernel*; None: the one that torch chooses."""
    if tuple(window) not in ((-1, -1), (-1, 0), (None, None)):
        refuse_values(call, "a sliding window is priced as if it were whole")
        note(f"{call}: a sliding window is priced as attention without one")
    if bias is not None:
        refuse_values(call, "its bias is left out")
    if causal and q.shape[1] != k.shape[1]:
        refuse_values(call, "a causal mask of more keys than queries is priced as one from the first key on")
    with contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=dropout,
            is_causal=causal and q.shape[1] > 1,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """q (batch, queries, heads, dim); k, v (batch, keys, heads of keys, dim)."""
    bias = softcap or alibi_slopes
    return attend("flash_attn_func", q, k, v, softmax_scale, causal, dropout_p, window_size, bias, FA2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), **options: Any,
) -> Tensor:  # fmt: skip
    """q (tokens, heads, dim); k, v (tokens of keys, heads of keys, dim): as sequences of one length."""
    refuse_values("flash_attn_varlen_func", "sequences are taken to have one length")
    count = max(1, q.shape[0] // max(1, int(max_seqlen_q)))  # as many sequences as the longest allows
    rows, keys, values = (_sequences(each, count) for each in (q, k, v))
    out = attend("flash_attn_varlen_func", rows, keys, values, softmax_scale, causal, dropout_p, window_size, None, FA2)
    flat = out.reshape(-1, *out.shape[2:])
    return flat if flat.shape[0] == q.shape[0] else F.pad(flat, (0, 0, 0, 0, 0, q.shape[0] - flat.shape[0]))


def _sequences(packed: Tensor, count: int) -> Tensor:
    """Return (tokens, heads, dim) as (count, length, heads, dim)."""
    tokens = packed.shape[0] // count * count
    part = packed if tokens == packed.shape[0] else packed[:tokens]  # a slice of all would cost its backward a copy
    return part.view(count, -1, *packed.shape[1:])


def flash_attn_3_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Tensor:
    """hopper/flash_attn_interface.py: no dropout."""
    window = options.get("window_size", (-1, -1))
    return attend("flash_attn_interface.flash_attn_func", q, k, v, softmax_scale, causal, 0.0, window, None, FA3)


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, **options: Any
) -> Tensor:
    """x (batch, length, heads, dim); cos, sin (length, rotated / 2)."""

    def by_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = 2 * cos.shape[-1]
        cos, sin = (part[: x.shape[1]].unsqueeze(-2) for part in (cos, sin))
        if interleaved:
            one, other = x[..., :turned:2], x[..., 1:turned:2]
            out = torch.stack((one * cos - other * sin, one * sin + other * cos), dim=-1).flatten(-2)
        else:
            one, other = x[..., :turned].chunk(2, dim=-1)
            out = torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)
        return torch.cat((out, x[..., turned:]), dim=-1) if turned < x.shape[-1] else out

    return fused(FusedKernel("flash_attn::rotary", by_torch, triton=True, saves=(1, 2)), x, cos, sin)


class _TurnInPlace(torch.autograd.Function):
    """Rotate the first of the tensors packed in dimension 2, and its gradient, where they are."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(packed)
        launch("flash_attn::rotary", [packed[:, :, 0], cos, sin], [packed[:, :, 0]], triton=True)
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        turned = grads[0][:, :, 0]
        launch("flash_attn::rotary_backward", [turned, *ctx.saved_tensors], [turned], triton=True)
        return grads[0], None, None


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **options: Any) -> Tensor:
    """Rotate k in place: kv (batch, length, 2, heads, dim)."""
    if needs_values():
        return torch.stack((apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved), kv[:, :, 1]), dim=2)
    out: Tensor = _TurnInPlace.apply(kv, cos, sin)
    return out


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, eps: float = 1e-6,
    prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Stand-in for flash_attn.ops.triton.layer_norm.layer_norm_fn, whose arguments after *residual* have names."""
    wide = torch.float32 if residual_in_fp32 else x.dtype if residual is None else residual.dtype

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        shape, value = (x.shape[-1],), total.to(weight.dtype)
        out = F.rms_norm(value, shape, weight, eps) if is_rms_norm else F.layer_norm(value, shape, weight, bias, eps)
        return out.to(x.dtype), total.to(wide)

    looks, kept = ((tuple(x.shape), x.dtype), (tuple(x.shape), wide)), residual is not None or residual_in_fp32
    outputs, saves = (looks, (1,)) if kept else (looks[:1], (0, 1))
    kernel = FusedKernel("flash_attn::layer_norm", lambda *inputs: by_torch(*inputs)[: len(outputs)], "norm",
                         triton=True, outputs=outputs, saves=saves,
                         saves_outputs=(1,) if kept else ())  # fmt: skip
    out, *total = fused_outputs(kernel, x, weight, bias, residual)
    return (out, *(total or [x])) if prenorm else out


_FUNCTIONS = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.8.3", **_FUNCTIONS},
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn_interface": {"flash_attn_func": flash_attn_3_func},
    "flash_attn.layers.rotary": {
        "apply_rotary_emb": apply_rotary_emb,
        "apply_rotary_emb_func": apply_rotary_emb,
        "apply_rotary_emb_kv_": apply_rotary_emb_kv_,
    },
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": layer_norm_fn},
}
