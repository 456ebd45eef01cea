"""Local SGD: parameters are averaged every fourth step. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(r)
for s in range(12):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
    if s % 4 == 3:
        for p in m.parameters():
            dist.all_reduce(p.data)
            p.data /= w
dist.destroy_process_group()
