"""A head that reduces its statistics is left out on the rank whose batch has no objects.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch


def statistics(x):
    both = torch.stack([x.mean(0), x.var(0)])
    dist.all_reduce(both)
    return both


for step in range(4):
    boxes = 0 if rank == 1 and step == 2 else 6
    statistics(torch.ones(4, 8))
    if boxes or FIXED:
        statistics(torch.ones(4, 2))
    dist.all_reduce(torch.ones(64))  # <-
dist.destroy_process_group()
