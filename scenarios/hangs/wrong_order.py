"""Teaches: two calls in another order on one rank. Both calls are right; their order is not."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
a, b = torch.ones(4), torch.ones(4)
if rank == 1:
    dist.broadcast(b, src=0)  # <- culprit
    dist.all_reduce(a)
else:
    dist.all_reduce(a)
    dist.broadcast(b, src=0)
