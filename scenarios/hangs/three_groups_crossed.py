"""Teaches: three groups of two ranks each, in a triangle: 0-1, 1-2, 2-0. Every rank begins with the group
on its right, so each waits for a rank that waits for the next.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group([i, (i + 1) % 3]) for i in range(3)]
t = torch.ones(4)
if rank < 3:
    dist.all_reduce(t, group=groups[rank])  # <- culprit
    dist.all_reduce(t, group=groups[(rank - 1) % 3])
