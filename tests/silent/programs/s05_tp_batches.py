"""Tensor parallel by DTensor; each rank of the TP group loads its own batch. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (w,))
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(0 if FIX else r)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()  # <- culprit
    o.step()
    o.zero_grad()
dist.destroy_process_group()
