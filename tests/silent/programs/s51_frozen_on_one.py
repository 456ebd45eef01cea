"""A layer is frozen on rank 1 only. ranks: 2"""

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


torch.manual_seed(0)
m = mlp()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(5 + r)
if r == 1 and not FIX:
    for q in m[0].parameters():
        q.requires_grad_(False)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    for q in m.parameters():
        if q.grad is None:
            q.grad = torch.zeros_like(q)
        t = q.grad.clone()
        dist.all_reduce(t)
        t /= w
        if q.requires_grad:
            q.grad.copy_(t)
        else:
            q.grad = None
    o.step()
    o.zero_grad()
dist.destroy_process_group()
