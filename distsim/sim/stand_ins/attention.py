"""Attention in the layout of flash_attn and xformers, by torch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from distsim.errors import NotSimulated
from distsim.sim.kernel.task import current_process

__all__ = ["attend", "lse_of", "refuse_values", "sequences"]


def refuse_values(call: str, why: str) -> None:
    """Raise NotSimulated for *call* where a run computes values (--data real), which the stand-in does not."""
    process = current_process()
    if process is not None and process.world.data.real:
        raise NotSimulated(f"{call} with --data real", f"{why}; simulate without --data real")


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
            process.world.note(f"{call}: a sliding window is priced as attention without one")
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
    """(tokens, heads, dim) as (sequences, length, heads, dim): as many sequences of one length as *longest* allows."""
    count = max(1, packed.shape[0] // max(1, int(longest)))
    length = packed.shape[0] // count
    return packed[: count * length].view(count, length, *packed.shape[1:])


def lse_of(q: Tensor) -> Tensor:
    """The logarithms of the sums of exponents, one a query and head, of q (batch, queries, heads, dim)."""
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
