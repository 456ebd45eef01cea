"""Branches may have lines of their own, as long as they make the same calls in the same order.

ranks: 3
kind: healthy
"""

from tests.cases.begin import dist, rank, torch

a, b = torch.ones(8), torch.zeros(8)
for _ in range(4):
    if rank == 1:
        dist.all_reduce(a)
        dist.all_reduce(b)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)
    if rank == 0:
        dist.broadcast(a, 0)
        dist.broadcast(b, 0)
    else:
        dist.broadcast(b, 0)
        dist.broadcast(b, 0)
dist.barrier()
