"""A weight is clamped in forward while fully_shard has gathered it. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(16, 16)
        s.b = nn.Linear(16, 4)

    def forward(s, x):
        if s.training and not FIX:
            with torch.no_grad():
                s.b.weight.clamp_(-0.05, 0.05)
        return s.b(F.relu(s.a(x)))


m = M()
fully_shard(m, mesh=init_device_mesh("cpu", (w,)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(1 + r)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
