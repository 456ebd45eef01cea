"""Teaches: the commonest hang. One rank does not make a call that the others make; it is simply not there."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
dist.all_reduce(t)
if rank != 2:  # a condition that is not the same on all ranks
    dist.all_reduce(t)  # <- waits
print(f"rank {rank} is done")
