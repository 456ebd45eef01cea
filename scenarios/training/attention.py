"""Which of torch's fused attentions comes nearest to the one that a framework's published figures were taken with, and
the kernels of flash-attn that nanotron calls on GPUs."""

from __future__ import annotations

import importlib

import torch


def as_published(device: torch.device, *, first: bool = False, framework: str = "") -> None:
    """FlashAttention-2 before Blackwell, whose frameworks have cuDNN's; where *first*, FlashAttention-1.

    torch takes cuDNN's on Hopper, too, since 2.10, and so does Transformer Engine, which Megatron-LM attends with;
    torchtitan's and nanotron's figures are older. llm-foundry's are of 2023 and of Triton's FlashAttention-1, whose
    speed the memory-efficient kernel has.
    """
    if device.type == "cuda":
        oldest = 9 if framework == "megatron" else 10
        torch.backends.cuda.enable_cudnn_sdp(torch.cuda.get_device_capability(device)[0] >= oldest)
        torch.backends.cuda.enable_flash_sdp(not first)


def triton_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply RMSNorm with flash-attn's Triton kernel (nanotron: nn/layer_norm.py, TritonRMSNorm)."""
    norm = importlib.import_module("flash_attn.ops.triton.layer_norm").layer_norm_fn
    return norm(x, weight, None, eps=1e-5, is_rms_norm=True)


def flash_attention(q: torch.Tensor, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Attention of q [batch, seq, heads, dim] over rotated kv [batch, seq, 2, heads, dim]: [seq, batch, hidden].

    As nanotron's CoreAttention (models/llama.py) it counts the tokens of each sequence in every layer.
    """
    rotary = importlib.import_module("flash_attn.layers.rotary")
    batch, seq, heads, dim = q.shape
    q = rotary.apply_rotary_emb_func(q, cos, sin)
    k, v = (part.reshape(batch * seq, -1, dim) for part in rotary.apply_rotary_emb_kv_(kv, cos, sin).unbind(2))
    mask = torch.ones(batch, seq, dtype=torch.bool, device=q.device)
    ends = [torch.zeros(batch + 1, dtype=torch.int32, device=q.device) for _ in range(2)]
    for end in ends:
        torch.cumsum(mask.sum(-1, dtype=torch.int32), dim=0, dtype=torch.int32, out=end[1:])
    attend = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    y = attend(q.reshape(batch * seq, heads, dim), k, v, *ends, seq, seq, causal=True)
    return y.view(batch, seq, heads * dim).transpose(0, 1)
