"""Rank 1's tensor has an element more.

ranks: 2, 3, 4
kind: shape_mismatch
culprits: 1
exit: 4
suite: check, smoke
tie: 2
"""

from tests.cases.begin import dist, rank, torch

dist.all_reduce(torch.ones(9 if rank == 1 else 8))  # <-
dist.barrier()
