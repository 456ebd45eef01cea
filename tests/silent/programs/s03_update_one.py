"""A weight is clamped after the step on rank 0 only. ranks: 2"""

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
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(r)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
    if (r == 0 or FIX) and s == 2:
        with torch.no_grad():
            m.module[0].weight.clamp_(-0.1, 0.1)  # <- culprit
dist.destroy_process_group()
