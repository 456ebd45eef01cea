"""Operators that only a GPU has, computed on the host for who wants real values: by what the CPU has in their place.

Each is called with the parts that the operator makes on a GPU (`plan.outs`) and its arguments on the host, and answers
with those parts' values; None where they say nothing (a dropout's state).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.sim.device.operators import host_cells
from distsim.torch_compat.device import DECOMPOSITION_TABLE, aten

__all__ = ["ON_HOST", "decomposed", "not_on_host"]

_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def not_on_host(what: Any, why: str) -> NotSimulated:
    return NotSimulated(f"{what} under --data real ({why})", "run that part on CPU tensors, or leave --data out")


def decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    """What *func*, which the CPU has not, comes to by torch's own decomposition of it. Raises NotSimulated."""

    parts = DECOMPOSITION_TABLE.get().get(func)
    if parts is None:
        raise not_on_host(func, "the CPU has no such operator")
    return parts(*args, **kwargs)


def _no_dropout(p: float) -> None:
    if p:
        raise not_on_host(f"attention with dropout {p:g}", "a GPU draws within the kernel")


def _even(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[list[Tensor], float]:
    """Heads of one width, as the CPU's operator wants them: zeros add nothing to a product."""
    width = max(query.shape[-1], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (query, key, value)], scale


def _attend(
    outs: Sequence[Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> list[Tensor | None]:
    _no_dropout(dropout)
    qkv, scale = _even(query, key, value, scale)
    out, sums = _forward(*qkv, 0.0, causal, attn_mask=bias, scale=scale)
    kept = torch.zeros(outs[1].size, dtype=outs[1].dtype, device="cpu")  # (batch, heads, queries), some add to that
    if kept.numel():
        kept.view(*sums.shape[:2], -1)[..., : sums.shape[2]].copy_(sums)
    return [out[..., : value.shape[-1]], kept]


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> list[Tensor | None]:
    qkv, scale = _even(query, key, value, scale)
    width = qkv[0].shape[-1]
    gradient, out = (F.pad(t, (0, width - t.shape[-1])) for t in (gradient, out))
    sums = sums.reshape(*sums.shape[:2], -1)[..., : query.shape[2]]
    by_head = sums.transpose(1, 2).contiguous().transpose(1, 2)
    found = _backward(gradient, *qkv, out, by_head, 0.0, causal, attn_mask=bias, scale=scale)
    return [g[..., : t.shape[-1]] for g, t in zip(found, (query, key, value), strict=True)]


def _flash(
    outs: Any,
    q: Any,
    k: Any,
    v: Any,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return _attend(outs, q, k, v, None, dropout, causal, scale)


def _flash_backward(
    outs: Any, gradient: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, cum_q: Any, cum_k: Any, max_q: Any,
    max_k: Any, dropout: float, causal: bool, seed: Any, offset: Any, *, scale: Any = None,
) -> Any:  # fmt: skip
    return _attend_backward(gradient, q, k, v, out, sums, None, causal, scale)


def _efficient(
    outs: Any, q: Any, k: Any, v: Any, bias: Any, keeps: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    return _attend(outs, q, k, v, bias, dropout, causal, scale)


def _efficient_backward(
    outs: Any, gradient: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any,
    dropout: float, wanted: Any, causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    return [*_attend_backward(gradient, q, k, v, out, sums, bias, causal, scale), None]


def _cudnn(
    outs: Any, q: Any, k: Any, v: Any, bias: Any, keeps: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    return _attend(outs, q, k, v, bias, dropout, causal, scale)


def _cudnn_backward(
    outs: Any, gradient: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any, bias: Any,
    cum_q: Any, cum_k: Any, max_q: Any, max_k: Any, dropout: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    return _attend_backward(gradient, q, k, v, out, sums, bias, causal, scale)


def _widened(softmax: Any) -> Callable[..., Any]:
    """A softmax that reads half precision and writes float32."""

    def call(outs: Any, x: Tensor, dim: int, to_float: bool) -> list[Tensor | None]:
        return [softmax(x.float() if to_float else x, dim, False)]

    return call


def _narrowed(backward: Any) -> Callable[..., Any]:
    """Its backward, whose gradient has the precision of what was read."""

    def call(outs: Any, gradient: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> list[Tensor | None]:
        return [backward(gradient, out, dim, gradient.dtype).to(dtype)]

    return call


def _parts(formula: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Sequence[Tensor | None]]:
    """*formula*, whose parts have the precision of those that a GPU makes."""

    def call(outs: Sequence[Any], *args: Any) -> list[Tensor | None]:
        return [None if part is None else part.to(out.dtype) for part, out in zip(formula(*args), outs, strict=True)]

    return call


ON_HOST: dict[Any, Callable[..., Sequence[Tensor | None]]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._thnn_fused_lstm_cell.default: _parts(host_cells.lstm_cell),
    aten._thnn_fused_lstm_cell_backward_impl.default: _parts(host_cells.lstm_cell_backward),
    aten._softmax.default: _widened(aten._softmax.default),
    aten._log_softmax.default: _widened(aten._log_softmax.default),
    aten._softmax_backward_data.default: _narrowed(aten._softmax_backward_data.default),
    aten._log_softmax_backward_data.default: _narrowed(aten._log_softmax_backward_data.default),
}
