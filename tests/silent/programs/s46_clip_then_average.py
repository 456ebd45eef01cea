"""Each rank clips its own gradient before the average. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def average(m):
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= w


torch.manual_seed(0)
m = mlp()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(5 + r)
for s in range(6):
    (F.cross_entropy(m(torch.randn(8, 16) * (1 + 3 * r)), torch.randint(4, (8,)))).backward()
    if FIX:
        average(m)
    nn.utils.clip_grad_norm_(m.parameters(), 0.05)
    if not FIX:
        average(m)
    o.step()
    o.zero_grad()
dist.destroy_process_group()
