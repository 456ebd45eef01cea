"""Rank 2's tensor has a NaN in the third step.

ranks: 3
kind: nan
culprits: 2
exit: 1
suite: gpus
nan: 1
"""

from tests.cases.begin import dist, rank, torch

x = torch.ones(4)
for step in range(4):
    if rank == 2 and step == 2:
        x[1] = float("nan")
    dist.all_reduce(x)  # <-
dist.destroy_process_group()
