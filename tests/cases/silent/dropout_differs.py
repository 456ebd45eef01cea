"""Dropout on the replicated residual stream draws other masks on each TP rank.

ranks: 2
kind: dropout_differs
suite: gpus
says: The values begin to differ with native_dropout at
unvalued: replicas_diverge
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world
from tests.cases.megatron import Copy, Reduce, part


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.ln = nn.LayerNorm(16)
        a, b = torch.randn(32, 16) * 0.2, torch.randn(16, 32) * 0.2
        s.w1, s.w2 = part(a, 0, world, rank), part(b, 1, world, rank)
        s.drop = nn.Dropout(0.2)

    def forward(s, x):
        return x + s.drop(
            Reduce.apply(F.gelu(F.linear(Copy.apply(s.ln(x), None), s.w1)) @ s.w2.t(), None)
        )  # <- culprit


torch.manual_seed(0)
m = nn.Sequential(Block(), Block())
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(5 if FIXED else 5 + rank)
g = torch.Generator().manual_seed(3)
for s in range(6):
    m(torch.randn(8, 16, generator=g)).pow(2).mean().backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
