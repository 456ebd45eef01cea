"""A pair whose first rank finds its loss too high tells the world, after a step of its own; the other pairs go on.

ranks: 4
kind: extra_collective
culprits: 2
exit: 4
says: `too_high`
"""

from tests.cases.begin import FIXED, dist, rank, torch, world

pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
weights = torch.ones(16)
for step in range(4):
    dist.all_reduce(weights, group=pairs[rank // 2])
    too_high = step == 2 and (FIXED or rank - 2 == 0)
    if too_high:
        dist.barrier()  # <-
dist.destroy_process_group()
