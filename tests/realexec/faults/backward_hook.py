# ranks: 3
# kind: rank_raised
# culprits: 1
# exit: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def hook(grad):
    if rank == 1:
        raise ValueError("bad gradient")  # <-
    return grad


model.module[0].weight.register_hook(hook)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
dist.barrier()
