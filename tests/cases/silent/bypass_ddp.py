"""The loop calls model.module(x): DDP's forward is bypassed and nothing is reduced.

ranks: 2
kind: replicas_diverge
unvalued: replicas_diverge
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy((m if FIXED else m.module)(x), y).backward()  # <- culprit
    o.step()
    o.zero_grad()
dist.destroy_process_group()
