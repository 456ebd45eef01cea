"""Teaches: a group forgotten: one rank of the pair reduces on the world instead of the pair's group, so
two calls wait, each for a rank that sits in the other.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
pair = dist.new_group([0, 1])
t = torch.ones(4)
if rank == 0:
    dist.all_reduce(t)  # <- culprit
elif rank == 1:
    dist.all_reduce(t, group=pair)  # <- waits
else:
    print(f"rank {rank} has nothing to reduce")
