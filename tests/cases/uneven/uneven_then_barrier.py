"""Rank 1 has one batch less than the others, and a barrier comes after the loop.

ranks: 2, 4
kind: uneven_iterations
culprits: 1
exit: 3
tie: 2
"""

from tests.cases.begin import FIXED, dist, rank, torch

for _ in range(5 if rank == 1 and not FIXED else 6):
    dist.all_reduce(torch.ones(4))
dist.barrier()  # <-
dist.destroy_process_group()
