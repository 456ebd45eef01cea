"""xformers.ops: memory_efficient_attention as scaled_dot_product_attention, and SwiGLU.

Source of names and arguments: facebookresearch/xformers, xformers/ops/fmha/__init__.py at v0.0.32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from distsim.sim.stand_ins.attention import attend

__all__ = ["MODULES"]


class LowerTriangularMask:
    """A causal mask: its class is all that is asked of it."""


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """The same, where there are more keys than queries."""


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
    causal = isinstance(attn_bias, LowerTriangularMask)
    four = [each if each.dim() == 4 else each.unsqueeze(2) for each in (query, key, value)]
    bias = None if causal else attn_bias
    out = attend("memory_efficient_attention", four[0], four[1], four[2], scale, causal, p, bias=bias)
    return out if query.dim() == 4 else out.squeeze(2)


class SwiGLU(nn.Module):
    """xformers.ops.SwiGLU."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.w12(x).chunk(2, dim=-1)
        out: Tensor = self.w3(F.silu(one) * other)
        return out


_MASKS = {kind.__name__: kind for kind in (LowerTriangularMask, LowerTriangularFromBottomRightMask)}
_OPS = {"memory_efficient_attention": memory_efficient_attention, "SwiGLU": SwiGLU, **_MASKS}
MODULES: dict[str, dict[str, Any]] = {
    "xformers": {"__version__": "0.0.32"},
    "xformers.ops": _OPS,
    "xformers.ops.fmha": {"memory_efficient_attention": memory_efficient_attention},
    "xformers.ops.fmha.attn_bias": _MASKS,
}
