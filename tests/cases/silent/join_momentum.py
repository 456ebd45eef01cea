"""Uneven shards under join(): a rank that has joined makes no step, and its momentum lacks what the others have.

ranks: 2
kind: optimizer_state_differs
"""

from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
o = torch.optim.SGD(m.parameters(), 0.05, momentum=0.9)
torch.manual_seed(1 + rank)
for epoch in range(3):
    with Join([m]):
        for s in range(4 if rank or FIXED else 2):
            m(torch.randn(4, 8)).pow(2).mean().backward()
            o.step()
            o.zero_grad()
dist.destroy_process_group()
