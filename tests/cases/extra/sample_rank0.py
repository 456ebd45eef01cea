"""Rank 0 alone samples from a model sharded by FSDP, which gathers its parameters in forward.

ranks: 2
kind: extra_collective
culprits: 0
exit: 4
"""

from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, dist, rank, torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)


@torch.no_grad()
def sample():
    x = torch.ones(1, 8)
    for _ in range(3):
        x = model(x)  # <-


for step in range(4):
    model(torch.ones(2, 8)).sum().backward()
    if step == 1 and (rank == 0 or FIXED):
        sample()
dist.destroy_process_group()
