"""Kernels that well-known packages bring along, by the names of the operators that a program makes of them."""

from __future__ import annotations

from distsim.kernels.call import Call, nbytes
from distsim.kernels.cost import Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.registry import rule

__all__: list[str] = []


@rule("megatron::scaled_upper_triang_masked_softmax")
def _causal_softmax(pricing: Pricing, call: Call) -> Cost:
    """Megatron-LM's: a warp a row, which reads no further than the diagonal and writes all
    (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h)."""
    moved = nbytes(call["scores"]) // 2 + call.write
    return pricing.bytes(moved, pricing.spec.memory.softmax_short, "softmax")


@rule("megatron::scaled_upper_triang_masked_softmax_backward")
def _causal_softmax_backward(pricing: Pricing, call: Call) -> Cost:
    """The same, of gradient and output."""
    return pricing.bytes(call.read // 2 + call.write, pricing.spec.memory.softmax_short, "softmax")


@rule("xentropy::forward")
def _cross_entropy(pricing: Pricing, call: Call) -> Cost:
    """apex's and flash-attn's: a block a row, once for the largest logit and once for the sum."""
    moved = nbytes(call["logits"]) + call.read + call.write
    return pricing.bytes(moved, pricing.spec.memory.elementwise, "softmax")


@rule("xentropy::backward")
def _cross_entropy_backward(pricing: Pricing, call: Call) -> Cost:
    """Logits in, their gradient out."""
    return pricing.bytes(call.read + call.write, pricing.spec.memory.elementwise, "softmax")
