"""Rank 1 does not clear its gradients.

ranks: 2
kind: stale_gradient
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


torch.manual_seed(0)
m = DDP(mlp())
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(5 + rank)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    if rank == 0 or FIXED:
        o.zero_grad()
dist.destroy_process_group()
