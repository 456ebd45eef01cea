"""Backward all-reduces a contiguous copy and returns the gradient itself.

ranks: 2
kind: replicas_diverge
unvalued: replicas_diverge
"""

from tests.cases.begin import FIXED, dist, nn, rank, torch, world
from tests.cases.megatron import part

gen = torch.Generator().manual_seed(3)
torch.manual_seed(0)


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        return x.view_as(x)

    @staticmethod
    def backward(c, d):
        e = d.contiguous()
        dist.all_reduce(e)
        return e if FIXED else d


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb = nn.Linear(16, 16)
        s.head = part(torch.randn(20, 16) * 0.2, 0, world, rank)

    def forward(s, x):
        h = Bad.apply(s.emb(x).t())
        return s.head @ h


m = M()
o = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(4):
    z = m(torch.randn(8, 16, generator=gen))
    (z.t().pow(2).sum() / 160).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
