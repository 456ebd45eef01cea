"""flash_attn, by torch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from distsim.errors import NotSimulated
from distsim.sim.kernel.task import current_process
from distsim.sim.stand_ins.fused import FusedKernel, fused, launch, needs_values, refuse_values

__all__ = ["MODULES"]

# -- Attention in the layout of flash_attn and xformers, by torch's scaled_dot_product_attention.


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
    """Attention of q (batch, queries, heads, dim) over k and v (batch, keys, heads of keys, dim). *kernel*: that of the
    library; None: as torch chooses."""
    if tuple(window) not in ((-1, -1), (-1, 0), (None, None)):
        refuse_values(call, "a sliding window is priced as if it were whole")
        process = current_process()
        if process is not None:
            process.port.note(f"{call}: a sliding window is priced as attention without one")
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


def sequences(packed: Tensor, longest: int) -> Tensor:
    """Return (tokens, heads, dim) as (sequences, length, heads, dim): as many sequences of one length as *longest*
    allows.
    """
    count = max(1, packed.shape[0] // max(1, int(longest)))
    length = packed.shape[0] // count
    return _first(packed, count * length).view(count, length, *packed.shape[1:])


def _first(packed: Tensor, tokens: int) -> Tensor:
    """Return the first *tokens*: a slice of all would cost its backward a copy."""
    return packed if tokens == packed.shape[0] else packed[:tokens]


def lse_of(q: Tensor) -> Tensor:
    """Return the logarithms of the sums of exponents, one a query and head, of q (batch, queries, heads, dim)."""
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)


# -- flash_attn 2.8 and flash_attn_interface (FlashAttention-3), by scaled_dot_product_attention and eager operators.
#
# Source of names and arguments: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py at v2.8.3, hopper/.
# Sequences of different lengths are priced as if all had the same length.

Window = tuple[int, int]
FA2, FA3 = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
"""The kernels of torch that have their speed: FlashAttention-2 is in torch, cuDNN's is as fast as FlashAttention-3
(arXiv:2407.08608, figure 5)."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q (batch, queries, heads, dim); k, v (batch, keys, heads of keys, dim)."""
    bias = softcap or alibi_slopes
    out = attend("flash_attn_func", q, k, v, softmax_scale, causal, dropout_p, window_size, bias, FA2)
    return (out, lse_of(q), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """qkv (batch, length, 3, heads, dim)."""
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """kv (batch, keys, 2, heads, dim)."""
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """q (tokens, heads, dim); k, v (tokens of keys, heads of keys, dim)."""
    refuse_values("flash_attn_varlen_func", "sequences are taken to have one length")
    rows = sequences(q, max_seqlen_q)
    keys, values = (_first(each, rows.shape[0] * (each.shape[0] // rows.shape[0])) for each in (k, v))
    keys, values = (each.view(rows.shape[0], -1, *each.shape[1:]) for each in (keys, values))
    out = attend("flash_attn_varlen_func", rows, keys, values, softmax_scale, causal, dropout_p, window_size, None, FA2)
    flat = out.reshape(-1, *out.shape[2:])
    if flat.shape[0] < q.shape[0]:
        flat = F.pad(flat, (0, 0, 0, 0, 0, q.shape[0] - flat.shape[0]))
    return (flat, lse_of(rows), None) if return_attn_probs else flat


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """qkv (tokens, 3, heads, dim)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """kv (tokens of keys, 2, heads, dim)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over the whole cache, as if it were full."""
    refuse_values("flash_attn_with_kvcache", "the cache is taken to be full")
    if k is not None and v is not None:
        k_cache[:, -k.shape[1] :].copy_(k)
        v_cache[:, -v.shape[1] :].copy_(v)
    out = attend("flash_attn_with_kvcache", q, k_cache, v_cache, softmax_scale, causal, 0.0, window_size, None, FA2)
    return (out, lse_of(q)) if return_softmax_lse else out


def flash_attn_3_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Any:
    """hopper/flash_attn_interface.py: no dropout."""
    window = options.get("window_size", (-1, -1))
    out = attend("flash_attn_interface.flash_attn_func", q, k, v, softmax_scale, causal, 0.0, window, None, FA3)
    return (out, lse_of(q)) if options.get("return_attn_probs") else out


def flash_attn_3_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Any:
    """hopper/flash_attn_interface.py: no dropout."""
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
        options.get("window_size", (-1, -1)),
    )  # fmt: skip


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
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

    out: Tensor = fused(FusedKernel("flash_attn::rotary", by_torch, saves=(1, 2)), x, cos, sin)
    return out


class _TurnInPlace(torch.autograd.Function):
    """Rotate the first *count* of the tensors packed in dimension 2, and their gradients, where they are."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(packed)
        launch("flash_attn::rotary", [packed[:, :, :count], cos, sin], [packed[:, :, :count]])
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        turned = grads[0][:, :, : ctx.count]
        launch("flash_attn::rotary_backward", [turned, *ctx.saved_tensors], [turned])
        return grads[0], None, None, None


def _turn_packed(packed: Tensor, count: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if needs_values() or not packed.is_cuda:
        turned = [apply_rotary_emb(each, cos, sin, interleaved) for each in packed.unbind(2)[:count]]
        return torch.stack((*turned, *packed.unbind(2)[count:]), dim=2)
    out: Tensor = _TurnInPlace.apply(packed, count, cos, sin)
    return out


def apply_rotary_emb_qkv_(qkv: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Rotate q and k in place: qkv (batch, length, 3, heads, dim)."""
    return _turn_packed(qkv, 2, cos, sin, kwargs.get("interleaved", args[2] if len(args) > 2 else False))


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, **options: Any) -> Tensor:
    """Rotate k in place: kv (batch, length, 2, heads, dim)."""
    return _turn_packed(kv, 1, cos, sin, interleaved)


class RotaryEmbedding(nn.Module):
    """Stand-in for flash_attn.layers.rotary.RotaryEmbedding, which keeps cos and sin of the longest sequence."""

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, **options: Any) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, base, interleaved
        self._angles: tuple[Tensor, Tensor] | None = None

    def forward(self, qkv: Tensor, kv: Tensor | None = None, **options: Any) -> Any:
        cos, sin = self._cos_and_sin(qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, self.interleaved)
        return apply_rotary_emb(qkv, cos, sin, self.interleaved), apply_rotary_emb_kv_(kv, cos, sin, self.interleaved)

    def _cos_and_sin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        known = self._angles
        if known is None or known[0].shape[0] < x.shape[1] or (known[0].dtype, known[0].device) != (x.dtype, x.device):
            with torch.no_grad():
                length = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
                steps = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32) / self.dim
                angles = torch.outer(length, self.base**-steps)
                known = self._angles = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return known


class RMSNorm(nn.Module):
    """Stand-in for flash_attn.ops.rms_norm.RMSNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **options: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, **options: Any) -> Any:
        return rms_norm_fn(x, self.weight, None, residual=residual, prenorm=prenorm, eps=self.eps)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x1: Any = None,
    weight1: Any = None,
    bias1: Any = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Any = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    **options: Any,
) -> Any:
    """Stand-in for flash_attn.ops.triton.layer_norm.layer_norm_fn."""
    wide = torch.float32 if residual_in_fp32 else x.dtype if residual is None else residual.dtype

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        shape, value = (x.shape[-1],), total.to(weight.dtype)
        out = F.rms_norm(value, shape, weight, eps) if is_rms_norm else F.layer_norm(value, shape, weight, bias, eps)
        return out.to(x.dtype), total.to(wide)

    looks, kept = ((tuple(x.shape), x.dtype), (tuple(x.shape), wide)), residual is not None or residual_in_fp32
    outputs, saves = (looks, (1,)) if kept else (looks[:1], (0, 1))
    kernel = FusedKernel("flash_attn::layer_norm", lambda *inputs: by_torch(*inputs)[: len(outputs)], "norm",
                         outputs=outputs, saves=saves, saves_outputs=(1,) if kept else ())  # fmt: skip
    out = fused(kernel, x, weight, bias, residual)
    out, total = out if kept else (out[0] if isinstance(out, tuple) else out, x)
    return (out, total) if prenorm else out


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Stand-in for flash_attn.ops.triton.layer_norm.rms_norm_fn."""
    kwargs["is_rms_norm"] = True
    return layer_norm_fn(x, weight, bias, *args, **kwargs)


class CrossEntropyLoss(nn.Module):
    """Stand-in for flash_attn.losses.cross_entropy.CrossEntropyLoss."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, **options: Any
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing
        }  # fmt: skip

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return _cross_entropy(input, target, **self.options)


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str, **options: Any) -> Tensor:
    """Return the loss of each row: one kernel forward, and one backward, which writes a separate gradient."""

    def by_torch(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none", **options)

    looks = ((tuple(labels.shape), torch.float32),)
    losses: Tensor = fused(FusedKernel("flash_attn::cross_entropy", by_torch, "softmax", outputs=looks), logits, labels)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (labels != options["ignore_index"]).sum()


def cross_entropy_loss(logits: Tensor, labels: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """flash_attn.ops.triton.cross_entropy.cross_entropy_loss: (losses, z losses)."""
    losses = _cross_entropy(logits, labels, "none", ignore_index=options.get("ignore_index", -100))
    return losses, torch.zeros_like(losses)


def unpad_input(hidden: Tensor, mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """flash_attn.bert_padding.unpad_input, as if nothing were padded."""
    refuse_values("flash_attn.bert_padding.unpad_input", "no token is taken to be padding")
    batch, length = mask.shape
    places = torch.arange(batch * length, device=hidden.device)
    starts = torch.arange(0, batch * length + 1, length, device=hidden.device, dtype=torch.int32)
    used = torch.full((batch,), length, device=hidden.device, dtype=torch.int32)
    return hidden.reshape(batch * length, *hidden.shape[2:]), places, starts, length, used


def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Stand-in for flash_attn.bert_padding.pad_input."""
    return hidden.reshape(batch, seqlen, *hidden.shape[1:])


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Stand-in for flash_attn.bert_padding.index_first_axis."""
    return x[indices]


_FUNCTIONS = {
    function.__name__: function
    for function in (
        flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
        flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache,
    )
}  # fmt: skip
_FLASH_ATTN: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.8.3", **_FUNCTIONS},
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn_interface": {
        "flash_attn_func": flash_attn_3_func,
        "flash_attn_varlen_func": flash_attn_3_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    },
    "flash_attn.layers.rotary": {
        "apply_rotary_emb": apply_rotary_emb,
        "apply_rotary_emb_func": apply_rotary_emb,
        "apply_rotary_emb_kv_": apply_rotary_emb_kv_,
        "apply_rotary_emb_qkv_": apply_rotary_emb_qkv_,
        "RotaryEmbedding": RotaryEmbedding,
    },
    "flash_attn.ops.rms_norm": {"RMSNorm": RMSNorm},
    "flash_attn.ops.triton.layer_norm": {
        "layer_norm_fn": layer_norm_fn, "rms_norm_fn": rms_norm_fn, "RMSNorm": RMSNorm
    },
    "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": CrossEntropyLoss},
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": cross_entropy_loss},
    "flash_attn.bert_padding": {
        "unpad_input": unpad_input, "pad_input": pad_input, "index_first_axis": index_first_axis
    },
}  # fmt: skip


# -- Extensions that flash_attn's repository builds one by one (csrc/rotary, csrc/xentropy, csrc/layer_norm). Programs
# call them within autograd functions of their own.

_NO_VALUES = "its values are not computed"


def _apply_rotary(
    x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, out1: Tensor, out2: Tensor, conj: bool = False
) -> None:
    refuse_values("rotary_emb.apply_rotary", _NO_VALUES)
    launch("flash_attn::rotary", [x1, x2, cos, sin], [out1, out2])


def _xentropy_forward(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, total_classes: int = -1
) -> tuple[Tensor, Tensor]:
    refuse_values("xentropy_cuda_lib.forward", _NO_VALUES)
    losses, sums = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    launch("flash_attn::xentropy", [logits, labels], [losses, sums], kind="softmax")
    return losses, sums


def _xentropy_backward(
    grad: Tensor, logits: Tensor, sums: Tensor, labels: Tensor, smoothing: float = 0.0, inplace: bool = False,
    total_classes: int = -1,
) -> Tensor:  # fmt: skip
    out = logits if inplace else torch.empty_like(logits)
    launch("flash_attn::xentropy_backward", [grad, logits, sums, labels], [out], kind="softmax")
    return out


def _norm_forward(
    x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, rowscale: Tensor | None,
    colscale: Tensor | None, x0_subset: Tensor | None, out_subset: Tensor | None, dropout_p: float, epsilon: float,
    rowscale_const: float, out_rows: int, generator: Any = None, residual_in_fp32: bool = False, rms: bool = False,
) -> list[Tensor | None]:  # fmt: skip
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
    launch("flash_attn::layer_norm", [x0, residual, gamma, beta, rowscale, colscale], out, kind="norm")
    return out


def _norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, x0: Tensor | None, mask: Tensor | None, mean: Tensor,
    deviation: Tensor, gamma: Tensor, rowscale: Tensor | None, colscale: Tensor | None, x0_subset: Tensor | None,
    out_subset: Tensor | None, dropout_p: float, rowscale_const: float, x0_rows: int, has_residual: bool,
    rms: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    read = [grad, grad_total, total, x0, mask, mean, deviation, gamma, rowscale, colscale]
    weights = [torch.empty_like(gamma) for _ in range(2 if colscale is None else 3)]
    of_residual = torch.empty_like(total) if has_residual else None
    out = [torch.empty_like(grad), of_residual, *weights[:2]]
    launch("flash_attn::layer_norm_backward", read, [*out, *weights[2:]], kind="norm", kernels=2)
    return [*out, None, None, *weights[2:]]


_EXTENSIONS: dict[str, dict[str, Any]] = {
    "rotary_emb": {"apply_rotary": _apply_rotary},
    "xentropy_cuda_lib": {"forward": _xentropy_forward, "backward": _xentropy_backward},
    "dropout_layer_norm": {"dropout_add_ln_fwd": _norm_forward, "dropout_add_ln_bwd": _norm_backward},
}

MODULES = {**_FLASH_ATTN, **_EXTENSIONS}
