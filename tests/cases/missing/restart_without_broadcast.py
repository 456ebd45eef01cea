"""Rank 1 finds its own checkpoint and does not come to the broadcast of the weights.

ranks: 2, 4
kind: missing_rank
culprits: 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch


def restore(found):
    weight = torch.zeros(4)
    if found:
        return torch.ones(4)
    dist.broadcast(weight, src=0)
    return weight


weight = restore(rank == 1 and not FIXED)
for _ in range(4):
    dist.all_reduce(weight)  # <-
dist.destroy_process_group()
