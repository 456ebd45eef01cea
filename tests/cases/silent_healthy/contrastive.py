"""Features are gathered by an autograd function; gradients are averaged by hand.

ranks: 2
kind: healthy
"""

from tests.cases.begin import F, dist, nn, rank, torch, world
from tests.cases.megatron import Gather


def average(m):
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 8))
o = torch.optim.SGD(m.parameters(), 0.1)
g = torch.Generator().manual_seed(30 + rank)
for s in range(6):
    x = torch.randn(8, 16, generator=g)
    a, b = m(x), m(x + 0.1)
    A, B = Gather.apply(F.normalize(a), None), Gather.apply(F.normalize(b), None)
    F.cross_entropy(A @ B.t() * 5, torch.arange(16)).backward()
    average(m)
    nn.utils.clip_grad_norm_(m.parameters(), 0.05)
    o.step()
    o.zero_grad()
dist.destroy_process_group()
