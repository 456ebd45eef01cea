"""A hook on a gradient raises on rank 1.

ranks: 3
kind: rank_raised
culprits: 1
exit: 1
"""

from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import dist, nn, rank, torch

model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def hook(grad):
    if rank == 1:
        raise ValueError("bad gradient")  # <-
    return grad


model.module[0].weight.register_hook(hook)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
dist.barrier()
