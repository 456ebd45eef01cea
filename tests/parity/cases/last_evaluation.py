# ranks: 4
# kind: extra_collective
# culprits: 0
# exit: 4
# cure: it stands under `if rank == 0 or
"""Rank 0 alone runs the sharded model once more after the last step, when the others have ended."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
net(torch.randn(2, 16)).sum().backward()
if rank == 0 or "fixed" in sys.argv:
    with torch.no_grad():
        net(torch.ones(2, 16))  # <-
