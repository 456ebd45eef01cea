"""PowerSGD hook: the reduced gradient is an approximation.

ranks: 2
kind: healthy
suite: gpus
"""

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as ps
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
m.register_comm_hook(ps.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), ps.powerSGD_hook)
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
