"""Multi-query attention: the key and value head is on every rank, and its gradient is a part.

ranks: 2
kind: replicas_diverge
unvalued: replicas_diverge
"""

from tests.cases.begin import FIXED, dist, nn, rank, torch, world
from tests.cases.megatron import Copy, Reduce, part

gen = torch.Generator().manual_seed(3)
torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.q = part(torch.randn(32, 16) * 0.2, 0, world, rank)
        s.kv = nn.Parameter(torch.randn(16, 16) * 0.2)
        s.o = part(torch.randn(16, 32) * 0.2, 1, world, rank)

    def forward(s, x):
        x1 = Copy.apply(x, None)
        q = (x1 @ s.q.t()).view(8, -1, 8).transpose(0, 1)
        kv = x1 @ (Copy.apply(s.kv, None) if FIXED else s.kv).t()
        k, v = kv[:, :8], kv[:, 8:]
        a = (q @ k.t() / 3).softmax(-1) @ v
        return x + Reduce.apply(a.transpose(0, 1).reshape(8, -1) @ s.o.t(), None)


m = M()
o = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(4):
    m(torch.randn(8, 16, generator=gen)).pow(2).mean().backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
