"""xformers.ops: attention, block diagonal masks and SwiGLU.

Source of names and arguments: facebookresearch/xformers, xformers/ops/fmha/__init__.py, fmha/attn_bias.py and
indexing.py at v0.0.32.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distsim.sim.stand_ins.attention import attend
from distsim.sim.stand_ins.fused import FusedKernel, fused

__all__ = ["MODULES"]


class LowerTriangularMask:
    """Stand-in for a causal mask, of which only the class is used."""


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Stand-in for a causal mask with more keys than queries, of which only the class is used."""


class BlockDiagonalMask:
    """Stand-in for a mask of sequences in one row, each of which attends to itself."""

    causal = False

    def __init__(self, q_seqlens: Sequence[int], kv_seqlens: Sequence[int], batch_sizes: Sequence[int] | None) -> None:
        self.q_seqlens, self.kv_seqlens, self._batch_sizes = list(q_seqlens), list(kv_seqlens), batch_sizes

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> BlockDiagonalMask:
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen, None)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        lengths = [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]
        mask = cls(lengths, lengths, [tensor.shape[0] for tensor in tensors])
        return mask, torch.cat([tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in tensors], dim=1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        parts, first, row = [], 0, 0
        for size in self._batch_sizes or [1] * len(self.q_seqlens):
            length = self.q_seqlens[first]
            part = tensor[:, row : row + size * length]
            parts.append(part.reshape(size, length, *tensor.shape[2:]))
            first, row = first + size, row + size * length
        return parts

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqlens, self.kv_seqlens, self._batch_sizes)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, p: float) -> Tensor:
        """Compute each run of sequences of one length at once."""
        parts, row, key_row = [], 0, 0
        for (length, key_length), run in groupby(zip(self.q_seqlens, self.kv_seqlens, strict=True)):
            count = len(list(run))
            q = query[:, row : row + count * length].reshape(count, length, *query.shape[2:])
            k, v = (
                each[:, key_row : key_row + count * key_length].reshape(count, key_length, *each.shape[2:])
                for each in (key, value)
            )
            out = attend("memory_efficient_attention", q, k, v, scale, self.causal, p)
            parts.append(out.reshape(1, count * length, *out.shape[2:]))
            row, key_row = row + count * length, key_row + count * key_length
        return torch.cat(parts, dim=1)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Stand-in for a block diagonal mask within which each position attends to earlier ones."""

    causal = True


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Return the rows *indices* of each of *sources* as one flat tensor."""
    return torch.cat([source[index.long()].flatten() for source, index in zip(sources, indices, strict=True)])


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """Return *input* with the scaled rows *source* added at *index*."""
    rows = source if scaling is None else source * scaling
    return torch.index_add(input, 0, index, rows.to(input.dtype), alpha=alpha)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.unbind(x, dim)
    return parts


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    """query (batch, queries, heads, dim), or (batch, queries, dim)."""
    if isinstance(attn_bias, BlockDiagonalMask):
        return attn_bias.attend(query, key, value, scale, p)
    causal = isinstance(attn_bias, LowerTriangularMask)
    four = [each if each.dim() == 4 else each.unsqueeze(2) for each in (query, key, value)]
    bias = None if causal else attn_bias
    out = attend("memory_efficient_attention", four[0], four[1], four[2], scale, causal, p, bias=bias)
    return out if query.dim() == 4 else out.squeeze(2)


class SwiGLU(nn.Module):
    """Stand-in for xformers.ops.SwiGLU."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.w12(x).chunk(2, dim=-1)
        kernel = FusedKernel("xformers::silu_mul", lambda one, other: F.silu(one) * other)
        out: Tensor = self.w3(fused(kernel, one, other))
        return out


_OPERATORS = ("xformers_flash::flash_fwd", "xformers_flash::flash_bwd", "xformers_flash3::flash_fwd",
              "xformers::efficient_attention_forward_cutlass")  # fmt: skip
"""Names of operators in torch.library. Programs list them for selective checkpointing and do not call them."""
if importlib.machinery.PathFinder.find_spec("xformers") is None:
    for operator in _OPERATORS:
        torch.library.define(operator, "(Tensor query, Tensor key, Tensor value) -> Tensor")

_MASKS = {
    kind.__name__: kind
    for kind in (
        LowerTriangularMask, LowerTriangularFromBottomRightMask, BlockDiagonalMask, BlockDiagonalCausalMask
    )
}  # fmt: skip
_OPS = {"memory_efficient_attention": memory_efficient_attention, "SwiGLU": SwiGLU, "unbind": unbind,
        "index_select_cat": index_select_cat, "scaled_index_add": scaled_index_add, **_MASKS}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "xformers": {"__version__": "0.0.32"},
    "xformers.ops": _OPS,
    "xformers.ops.fmha": {"memory_efficient_attention": memory_efficient_attention, **_MASKS},
    "xformers.ops.fmha.attn_bias": _MASKS,
}
