"""Teaches: a circle through two kinds of calls: one rank waits in a send, the other in a barrier."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    dist.send(torch.ones(4), dst=1)  # <- culprit
    dist.barrier()
else:
    dist.barrier()  # <- waits
    if rank == 1:
        dist.recv(torch.zeros(4), src=0)
