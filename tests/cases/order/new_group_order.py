"""Each rank makes the groups in the order of its own dict: rank 2 makes tensor and data groups the other way round.

ranks: 4
kind: group_creation_order
culprits: 2
exit: 4
"""

from tests.cases.begin import FIXED, dist, rank, torch

plan = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
if rank == 2 and not FIXED:
    plan = dict(reversed(plan.items()))
mine = {}
for name, lists in plan.items():
    for ranks in lists:
        group = dist.new_group(ranks)  # <-
        if rank in ranks:
            mine[name] = group
dist.all_reduce(torch.ones(2), group=mine["tp"])
dist.all_reduce(torch.ones(2), group=mine["dp"])
dist.destroy_process_group()
