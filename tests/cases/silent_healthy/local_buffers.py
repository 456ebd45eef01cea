"""State of a rank in buffers that no checkpoint has, counters, and batch norm.

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        s.register_buffer("cache", torch.zeros(8, 16), persistent=False)
        s.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(s, x):
        s.cache.copy_(x.detach())
        s.n += rank + 1
        return s.net(x)


torch.manual_seed(0)
m = DDP(M(), broadcast_buffers=False)
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(1 + rank)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
