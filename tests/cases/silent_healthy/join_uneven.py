"""Uneven shards under join(), with an optimizer that keeps no state: the replicas are equal when all have joined.

ranks: 3
kind: healthy
"""

from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
o = torch.optim.SGD(m.parameters(), 0.05)
torch.manual_seed(1 + rank)
for epoch in range(3):
    with Join([m]):
        for s in range((2, 5, 4)[rank]):
            m(torch.randn(4, 8)).pow(2).mean().backward()
            o.step()
            o.zero_grad()
    total = torch.ones(())
    dist.reduce(total, dst=0)
dist.destroy_process_group()
