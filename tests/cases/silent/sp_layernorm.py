"""Megatron-like sequence parallel: the LayerNorm's gradient is not all-reduced over TP.

ranks: 2
kind: replicas_diverge
suite: gpus
unvalued: replicas_diverge
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world
from tests.cases.megatron import Gather, Scatter, part


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.ln = nn.LayerNorm(16)
        a, b = torch.randn(32, 16) * 0.2, torch.randn(16, 32) * 0.2
        s.w1, s.w2 = part(a, 0, world, rank), part(b, 1, world, rank)

    def forward(s, x):
        return x + Scatter.apply(F.gelu(F.linear(Gather.apply(s.ln(x), None), s.w1)) @ s.w2.t(), None)


torch.manual_seed(0)
m = Block()
o = torch.optim.AdamW(m.parameters(), 1e-2)
for s in range(6):
    x = torch.randn(8, 16)
    out = m(x.chunk(world)[rank])
    (out.pow(2).sum() / x.numel()).backward()
    if FIXED:
        for p in m.ln.parameters():
            dist.all_reduce(p.grad)
    o.step()
    o.zero_grad()  # <- culprit
dist.destroy_process_group()
