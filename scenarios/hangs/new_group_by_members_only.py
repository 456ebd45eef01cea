"""Teaches: new_group must be called by all ranks of the world, members or not; here only the members do.

torch names groups by counting them. Nothing happens at once: but from here on the ranks count
differently, and the next group, which all of them make, has two names.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank in (0, 1):
    pair = dist.new_group([0, 1])  # <- culprit
    dist.all_reduce(torch.ones(4), group=pair)
everyone = dist.new_group()
dist.all_reduce(torch.ones(4), group=everyone)
