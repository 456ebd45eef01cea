"""Rank 0 passes a list that is too short to scatter.

ranks: 3
kind: rank_raised
culprits: 0
exit: 1
"""

from tests.cases.begin import dist, rank, torch

out = torch.zeros(2)
dist.scatter(out, [torch.ones(2)] * 2 if rank == 0 else None, src=0)  # <-
dist.barrier()
