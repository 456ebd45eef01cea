"""Teaches: one rank calls another operation at the same place: reduce where the others all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
if rank == 2:
    dist.reduce(t, dst=0)  # <- culprit
else:
    dist.all_reduce(t)
dist.barrier()
