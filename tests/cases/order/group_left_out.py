"""One rank leaves out one of three new_group calls: its second is the others' second, and the third never comes.

ranks: 4
kind: group_creation_order
culprits: 3
exit: 4
says: Call new_group on every rank of the default group
"""

from tests.cases.begin import FIXED, dist, rank, torch

groups = []
for layer in range(3):
    if rank == 3 and layer == 1 and not FIXED:
        continue
    groups.append(dist.new_group([0, 1, 2, 3]))
dist.all_reduce(torch.ones(2), group=groups[-1])  # <-
dist.barrier()
dist.destroy_process_group()
