"""A weight is clamped after the step on rank 0 only.

ranks: 2
kind: changed_outside_step
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
    if (rank == 0 or FIXED) and s == 2:
        with torch.no_grad():
            m.module[0].weight.clamp_(-0.1, 0.1)  # <- culprit
dist.destroy_process_group()
