"""A bit of Adam's first moment flips on rank 2 after step 3.

ranks: 4
kind: optimizer_state_differs
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.Adam(m.parameters(), 1e-2)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
    if rank == 2 and s == 2 and not FIXED:
        moment = o.state[m.module[0].weight]["exp_avg"].view(-1)
        moment.view(torch.int32)[5] ^= 1 << 26  # <- culprit
dist.destroy_process_group()
