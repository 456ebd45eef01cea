"""Rank 1 makes a barrier where the others make an all_reduce.

ranks: 2, 3, 4
kind: op_mismatch
culprits: 1
exit: 4
tie: 2
"""

from tests.cases.begin import dist, rank, t

if rank == 1:
    dist.barrier()  # <-
else:
    dist.all_reduce(t)
dist.all_reduce(t)
