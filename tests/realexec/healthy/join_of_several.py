# ranks: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(8, 8))
optim = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01)
with Join([model, optim]):
    for _ in range(2 + rank):
        model(torch.ones(2, 8)).sum().backward()
        optim.step()
with Join([model]):
    for _ in range(2 + rank):
        model(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
