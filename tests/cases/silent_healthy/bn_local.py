"""BatchNorm without sync under DDP; buffers differ on purpose.

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)), broadcast_buffers=False)
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
