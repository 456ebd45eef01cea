"""Teaches: one rank makes a call that the others do not make, here a barrier left over from debugging."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
dist.all_reduce(t)
if rank == 3:
    dist.barrier()  # <- culprit
dist.all_reduce(t)
dist.broadcast(t, src=0)
