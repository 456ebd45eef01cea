"""Rank 3 leaves its pair's loop a step early, and waits in the barrier of all.

ranks: 4
kind: uneven_iterations
culprits: 3
exit: 3
"""

from tests.cases.begin import dist, rank, t

a = dist.new_group([0, 1], group_desc="pair_a")
b = dist.new_group([2, 3], group_desc="pair_b")
mine = a if rank < 2 else b
for step in range(3):
    if rank == 3 and step == 2:
        break
    dist.all_reduce(t, group=mine)
dist.barrier()  # <-
