"""Fused attention, forward and backward, by every name that PyTorch has for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from distsim.kernels.attention import Attention
from distsim.kernels.call import Call, nbytes
from distsim.kernels.cost import Cost
from distsim.kernels.pricing import Pricing
from distsim.kernels.rules.registry import rule

__all__: list[str] = []


def _kernel(name: str) -> str:
    for kernel in ("cudnn", "efficient"):
        if kernel in name:
            return kernel
    return "flash"


def _shape(call: Call) -> Attention:
    """From batch x heads x length x dimension; what is named attention_forward has heads and length swapped, and
    packed sequences without a batch."""
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


def _packed(call: Call) -> Any:
    """Where sequences begin, if they are packed; they are taken to be of one length."""
    for name in ("cum_seq_q", "cu_seqlens_q", "cu_seqlens_q_", "seqstart_q"):
        found = call[name]
        if isinstance(found, torch.Tensor):
            return found
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
def _fused(pricing: Pricing, call: Call) -> Cost:
    shape = _shape(call)
    kernel = _kernel(call.name)
    if "overrideable" in call.name:
        kernel = pricing.spec.attention.preferred
    tensors = [call[name] for name in ("query", "key", "value", "out", "grad_out", "grad_out_", "attn_bias", "bias")]
    return pricing.attention(shape, kernel, nbytes(tensors) + call.write)


@rule("scaled_dot_product_attention")
def _unresolved(pricing: Pricing, call: Call) -> Cost:
    """The operator above its implementations: by the one that PyTorch would take."""
    query = call["query"]
    plain = query.dtype in (torch.float16, torch.bfloat16) and call["attn_mask"] is None
    kernel = pricing.spec.attention.preferred if plain else "efficient"
    return pricing.attention(_shape(call), kernel, call.read + call.write)
