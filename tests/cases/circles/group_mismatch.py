"""Rank 0 is in a pair's call, rank 1 in one of three ranks, and rank 2 has gone on to the barrier.

ranks: 4
kind: deadlock_cycle
culprits: 0, 1
exit: 3
"""

from tests.cases.begin import dist, rank, t

pair = dist.new_group([0, 1])
most = dist.new_group([0, 1, 2])
dist.all_reduce(t, group=pair if rank == 0 else most) if rank in (0, 1) else None
dist.barrier()
