"""Sequence parallel: dropout of the shards uses one seed on all ranks.

ranks: 2
kind: equal_dropout
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world
from tests.cases.megatron import Gather, Scatter, part

gen = torch.Generator().manual_seed(3)
torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.w1 = part(torch.randn(32, 16) * 0.2, 0, world, rank)
        s.w2 = part(torch.randn(16, 32) * 0.2, 1, world, rank)

    def forward(s, x):
        return x + F.dropout(Scatter.apply(F.gelu(Gather.apply(x, None) @ s.w1.t()) @ s.w2.t(), None), 0.3)


m = M()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(11 + rank * FIXED)
for _ in range(4):
    (m(torch.randn(8, 16, generator=gen).chunk(world)[rank]).pow(2).sum() / 128).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
