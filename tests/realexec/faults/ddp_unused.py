# ranks: 2
# kind: ddp_unused_parameter
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x, skip):
        x = self.body(x)
        return x if skip else self.head(x)


model = DistributedDataParallel(Net())
for step in range(4):
    model(torch.ones(2, 8), rank == 1 and step == 2).sum().backward()
dist.destroy_process_group()
