"""GPT as nanoGPT writes it: LayerNorm, GELU, learned positions, the embedding's weight again at the output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.proj = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(hidden, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, bias=bias)
        self.attention = Attention(hidden, heads, bias)
        self.ffn_norm = nn.LayerNorm(hidden, bias=bias)
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class GPT(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]; 124 M parameters in the shape of GPT-2."""

    def __init__(self, args: Any, *, bias: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.hidden)
        self.positions = nn.Embedding(args.seq, args.hidden)
        shape = (args.hidden, args.heads, args.ffn, bias)
        self.layers = nn.ModuleDict({str(n): Block(*shape) for n in range(args.layers)})
        self.norm = nn.LayerNorm(args.hidden, bias=bias)

    @torch.no_grad()
    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return F.linear(self.norm(x), self.tok_embeddings.weight)
