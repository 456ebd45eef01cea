"""Rank 0 has one batch more than the others.

ranks: 2, 4
kind: uneven_iterations
culprits: 1 | 0
exit: 3
tie: 2
"""

from tests.cases.begin import FIXED, dist, rank, torch

for _ in range(6 if rank == 0 and not FIXED else 5):
    dist.all_reduce(torch.ones(4))  # <-
dist.destroy_process_group()
