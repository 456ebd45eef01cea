"""Teaches: two groups over the same ranks, used in opposite order.

Each call waits for ranks that sit in the other.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
first, second = dist.new_group(), dist.new_group()
t = torch.ones(4)
if rank == 0:
    dist.all_reduce(t, group=second)  # <- culprit
    dist.all_reduce(t, group=first)
else:
    dist.all_reduce(t, group=first)  # <- waits
    dist.all_reduce(t, group=second)
