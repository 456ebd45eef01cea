"""Loss normalised by the local count of tokens, which differs between ranks. ranks: 2"""

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
    x, y = torch.randn(16, 16), torch.randint(4, (16,))
    y[(4 if r else 14) :] = -100
    if FIX:
        n = (y >= 0).sum()
        dist.all_reduce(n)
        loss = F.cross_entropy(m(x), y, reduction="sum") * w / n
    else:
        loss = F.cross_entropy(m(x), y)  # <- culprit
    loss.backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
