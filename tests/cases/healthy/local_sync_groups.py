"""Groups that only their members make.

ranks: 4
kind: healthy
"""

from tests.cases.begin import dist, rank, t

if rank < 2:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(t, group=group)
else:
    group = dist.new_group([2, 3], use_local_synchronization=True)
    dist.all_reduce(t, group=group)
    again = dist.new_group([2, 3], use_local_synchronization=True)
dist.barrier()
dist.destroy_process_group()
