"""A model and a ZeRO optimizer in one Join, then the model alone.

ranks: 2
kind: healthy
"""

from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import dist, nn, rank, torch

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
