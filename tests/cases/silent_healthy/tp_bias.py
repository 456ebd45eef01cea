"""Column-parallel bias starts at zero on every rank and is a shard.

ranks: 2
kind: healthy
"""

from tests.cases.begin import F, dist, nn, rank, torch, world
from tests.cases.megatron import Copy, Reduce, part


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.ln = nn.LayerNorm(16)
        a, b = torch.randn(32, 16) * 0.2, torch.randn(16, 32) * 0.2
        s.w1, s.w2 = part(a, 0, world, rank), part(b, 1, world, rank)
        s.b1 = nn.Parameter(torch.zeros(32 // world))
        s.b2 = nn.Parameter(torch.zeros(16))

    def forward(s, x):
        return x + Reduce.apply(F.gelu(F.linear(Copy.apply(s.ln(x), None), s.w1, s.b1)) @ s.w2.t(), None) + s.b2


torch.manual_seed(0)
m = nn.Sequential(Block(), Block())
o = torch.optim.AdamW(m.parameters(), 1e-2)
g = torch.Generator().manual_seed(3)
for s in range(6):
    m(torch.randn(8, 16, generator=g)).pow(2).mean().backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
