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

from distsim.libraries.flash_attn import attend
from distsim.libraries.fused import FusedKernel, fused


class AttentionBias:
    """Stand-in for what is added to the scores of an attention."""


class LowerTriangularMask(AttentionBias):
    """Stand-in for a causal mask, of which only the class is used."""


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Stand-in for a causal mask with more keys than queries, of which only the class is used."""


class BlockDiagonalMask(AttentionBias):
    """Stand-in for a mask of sequences in one row, each of which attends to itself."""

    def __init__(self, lengths: Sequence[int], batch_sizes: Sequence[int]) -> None:
        self.lengths, self._batch_sizes = lengths, batch_sizes

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        lengths = [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]
        mask = cls(lengths, [tensor.shape[0] for tensor in tensors])
        return mask, torch.cat([tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in tensors], dim=1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        parts, first, row = [], 0, 0
        for size in self._batch_sizes:
            length = self.lengths[first]
            part = tensor[:, row : row + size * length]
            parts.append(part.reshape(size, length, *tensor.shape[2:]))
            first, row = first + size, row + size * length
        return parts

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, p: float) -> Tensor:
        """Compute each run of sequences of one length at once."""
        parts, row = [], 0
        for length, run in groupby(self.lengths):
            count = len(list(run))
            rows = slice(row, row + count * length)
            q, k, v = (each[:, rows].reshape(count, length, *each.shape[2:]) for each in (query, key, value))
            out = attend("memory_efficient_attention", q, k, v, scale, False, p)
            parts.append(out.reshape(1, count * length, *out.shape[2:]))
            row = rows.stop
        return torch.cat(parts, dim=1)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: Any = None,
) -> Tensor:  # fmt: skip
    """query (batch, queries, heads, dim), or (batch, queries, dim)."""
    if isinstance(attn_bias, BlockDiagonalMask):
        return attn_bias.attend(query, key, value, scale, p)
    causal = isinstance(attn_bias, LowerTriangularMask)
    four = [each if each.dim() == 4 else each.unsqueeze(2) for each in (query, key, value)]
    bias = None if causal else attn_bias
    out = attend("memory_efficient_attention", four[0], four[1], four[2], scale, causal, p, bias=bias)
    return out if query.dim() == 4 else out.squeeze(2)


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Return the rows *indices* of each of *sources* as one flat tensor."""
    return torch.cat([source[index.long()].flatten() for source, index in zip(sources, indices, strict=True)])


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """Return *input* with the scaled rows *source* added at *index*."""
    rows = source if scaling is None else source * scaling
    return torch.index_add(input, 0, index, rows.to(input.dtype), alpha=alpha)


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

_KINDS = (AttentionBias, LowerTriangularMask, LowerTriangularFromBottomRightMask, BlockDiagonalMask)
_MASKS = {kind.__name__: kind for kind in _KINDS}
_ATTENTION = {"memory_efficient_attention": memory_efficient_attention, **_MASKS}
MODULES: dict[str, dict[str, Any]] = {
    "xformers": {"__version__": "0.0.32"},
    "xformers.ops": {
        **_ATTENTION, "SwiGLU": SwiGLU, "unbind": torch.unbind, "index_select_cat": index_select_cat,
        "scaled_index_add": scaled_index_add,
    },
    "xformers.ops.fmha": _ATTENTION,
    "xformers.ops.fmha.attn_bias": _MASKS,
}  # fmt: skip
