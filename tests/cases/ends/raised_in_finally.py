"""Rank 1 raises, and a finally block calls barrier.

ranks: 3
kind: rank_raised
culprits: 1
exit: 1
suite: check, strict
"""

from tests.cases.begin import dist, rank, t

try:
    if rank == 1:
        raise ValueError("a bad shard")
    dist.all_reduce(t)
finally:
    dist.barrier()
