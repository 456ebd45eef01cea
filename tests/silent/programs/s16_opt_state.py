"""Adam's state is restored on rank 0 only. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.Adam(m.parameters(), 1e-2)
torch.manual_seed(r)
sd = o.state_dict()
sd["state"] = {
    i: {"step": torch.tensor(9.0), "exp_avg": torch.full_like(p, 0.1), "exp_avg_sq": torch.full_like(p, 0.1)}
    for i, p in enumerate(m.parameters())
}
if r == 0 or FIX:
    o.load_state_dict(sd)  # <- culprit
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
