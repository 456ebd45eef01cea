"""Llama in plain operators, module for module as torchtitan writes it: what FSDP2 wraps and DTensor cuts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """In float32 and unfused, as torch's own was when the figures were taken (2.6); or *fused*, in one kernel that
    keeps no copy in float32."""

    def __init__(self, hidden: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.ones(hidden))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        up = x.float()
        up = up * torch.rsqrt(up.pow(2).mean(-1, keepdim=True) + 1e-5)
        return up.type_as(x) * self.weight


def rotations(head_dim: int, seq: int) -> torch.Tensor:
    """cos + i sin of every position and pair of channels: complex64 [seq, head_dim / 2]."""
    speeds = 1.0 / (500000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(seq).float(), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [batch, seq, heads, head_dim], in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.groups = heads // kv_heads
        self.wq = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        # -1 heads: with tensor parallelism only this rank's are here.
        q = rotate(self.wq(x).view(batch, seq, -1, self.head_dim), turns)
        k = rotate(self.wk(x).view(batch, seq, -1, self.head_dim), turns)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        if self.groups > 1:
            k = k.repeat_interleave(self.groups, dim=2)
            v = v.repeat_interleave(self.groups, dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, fused_norm: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden, fused_norm)
        self.attention = Attention(hidden, heads, kv_heads)
        self.ffn_norm = RMSNorm(hidden, fused_norm)
        self.feed_forward = FeedForward(hidden, ffn)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]; 8.03 B parameters in the shape of Llama-3-8B.

    One of several *stages* has its share of the layers; the first takes tokens, the last gives logits, all others
    activations [batch, seq, hidden].
    """

    def __init__(self, args: Any, number: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.head_dim, self.seq = args.hidden // args.heads, args.seq
        first, last = number == 0, number == stages - 1
        self.tok_embeddings = nn.Embedding(args.vocab, args.hidden) if first else None
        self.register_buffer("turns", rotations(self.head_dim, self.seq), persistent=False)
        shape = (args.hidden, args.heads, args.kv_heads, args.ffn, args.fused_norm)
        mine = range(number * args.layers // stages, (number + 1) * args.layers // stages)
        self.layers = nn.ModuleDict({str(n): Block(*shape) for n in mine})
        self.norm = RMSNorm(args.hidden, args.fused_norm) if last else None
        self.output = nn.Linear(args.hidden, args.vocab, bias=False) if last else None

    @torch.no_grad()
    def init_weights(self) -> None:
        """After to_empty(): the parameters as one starts, and the buffers again."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        self.turns = rotations(self.head_dim, self.seq).to(self.turns.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return x if self.output is None else self.output(self.norm(x))
