# kind: extra_collective
# culprits: 0
# exit: 4
# ranks: 2

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2 and rank == 0:
        model(torch.ones(2, 8))  # validation on one rank only  # <-
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
