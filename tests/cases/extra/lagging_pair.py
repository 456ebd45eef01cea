"""A rank that finds its loss too high tells the world, after a step of its pair; the other rank is in the next step.

ranks: 2
kind: extra_collective
culprits: 1
exit: 4
says: `too_high`
"""

from tests.cases.begin import FIXED, dist, rank, torch

pair = dist.new_group([0, 1])
weights = torch.ones(16)
for step in range(4):
    dist.all_reduce(weights, group=pair)
    too_high = step == 2 and (FIXED or 2 - rank == 1)
    if too_high:
        dist.barrier()  # <-
dist.destroy_process_group()
