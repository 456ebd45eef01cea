"""Calls on all pairs of four ranks.

ranks: 4
kind: healthy
"""

from tests.cases.begin import dist, rank, t, world

groups = [dist.new_group([i, j]) for i in range(world) for j in range(i + 1, world)]
for _ in range(3):
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.all_reduce(t, group=group)
dist.barrier()
dist.destroy_process_group()
