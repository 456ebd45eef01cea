"""A rank file maps the launcher's slots to ranks; rank 2 leaves out its tensor-parallel call in one step.

ranks: 4
kind: missing_rank
culprits: 2
exit: 3
says: it stands under `if rank != 2 or step != 1
"""

import os
import sys

import torch
import torch.distributed as dist

order, world = [3, 1, 0, 2], int(os.environ["WORLD_SIZE"])
rank = order[int(os.environ["RANK"])]
dist.init_process_group("gloo", rank=rank, world_size=world)


def mine(lists):
    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)


tensor, data = mine([[0, 1], [2, 3]]), mine([[0, 2], [1, 3]])
for step in range(3):
    if rank != 2 or step != 1 or "fixed" in sys.argv:
        dist.all_reduce(torch.ones(8), group=tensor)
    dist.all_reduce(torch.ones(16), group=data)
dist.barrier()  # <-
dist.destroy_process_group()
