"""Groups of ranks in any order, in whose calls the order of ranks does not matter, or is kept, or is ascending.

ranks: 4
kind: healthy
"""

from tests.cases.begin import dist, t, torch, world

order = list(reversed(range(world)))
dist.all_reduce(t, group=dist.new_group(order))
dist.broadcast(t, 0, group=dist.new_group({3, 1, 0, 2}))
kept, ascending = dist.new_group(order, sort_ranks=False), dist.new_group(range(world))
for group in (kept, ascending):
    dist.all_gather([torch.empty(8) for _ in order], t, group=group)
dist.destroy_process_group()
