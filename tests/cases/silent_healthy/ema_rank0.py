"""An EMA copy of the model lives on rank 0 only.

ranks: 2
kind: healthy
"""

import copy

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
m = DDP(net)
ema = copy.deepcopy(net) if rank == 0 else None
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
    if ema is not None:
        with torch.no_grad():
            for a, b in zip(ema.parameters(), net.parameters(), strict=False):
                a.lerp_(b, 0.1)
            ema(x)
dist.destroy_process_group()
