"""One rank has another table of stages, so that it makes a group of other members at the same line.

ranks: 4
kind: group_creation_order
culprits: 3
exit: 4
says: Compute the members at
"""

from tests.cases.begin import FIXED, dist, rank, torch, world

stages = [0, 1, 1, 2] if rank != 3 or FIXED else [0, 1, 2, 2]
groups = {stage: dist.new_group([r for r in range(world) if stages[r] == stage]) for stage in sorted(set(stages))}  # <-
dist.all_reduce(torch.ones(2), group=groups[stages[rank]])
dist.destroy_process_group()
