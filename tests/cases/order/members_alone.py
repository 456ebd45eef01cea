"""Each rank makes the groups that it is in, and passes those of others.

ranks: 4
kind: group_creation_order
culprits: 2, 3
exit: 4
says: leaves it out on the ranks that are not in it
"""

from tests.cases.begin import FIXED, dist, rank, torch

groups = []
for members in ([0, 1], [0, 1, 2, 3]):
    if not FIXED and rank not in members:
        continue
    groups.append(dist.new_group(members))  # <-
dist.all_reduce(torch.ones(2), group=groups[-1])
dist.barrier()
dist.destroy_process_group()
