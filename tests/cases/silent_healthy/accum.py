"""Gradient accumulation with no_sync, done right.

ranks: 2
kind: healthy
"""

import contextlib

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    for k in range(4):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        with contextlib.nullcontext() if k == 3 else m.no_sync():
            (F.cross_entropy(m(x), y) / 4).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
