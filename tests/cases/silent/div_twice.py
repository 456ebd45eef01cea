"""The loss is divided by the world size, and DDP averages again.

ranks: 4
kind: gradient_scale
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    loss = F.cross_entropy(m(x), y)
    (loss if FIXED else loss / world).backward()  # <- culprit
    o.step()
    o.zero_grad()
dist.destroy_process_group()
