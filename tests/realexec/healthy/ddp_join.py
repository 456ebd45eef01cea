# ranks: 2

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

model = DistributedDataParallel(nn.Linear(8, 8))
with model.join():
    for _ in range(3 + 2 * rank):
        model(torch.ones(2, 8)).sum().backward()
with model.join(divide_by_initial_world_size=False):  # its C++ waits for a handle that Python has dropped
    for _ in range(3 + 2 * rank):
        model(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
