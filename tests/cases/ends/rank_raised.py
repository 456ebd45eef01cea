"""Rank 1 raises.

ranks: 2, 3, 4
kind: rank_raised
culprits: 1
exit: 1
"""

from tests.cases.begin import dist, rank, t

if rank == 1:
    raise ValueError("a bad shard")  # <-
dist.all_reduce(t)
