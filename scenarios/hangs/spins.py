"""Teaches: a rank that never comes back from its own Python: a loop whose end never comes true."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
dist.all_reduce(t)
if rank == 1:
    done = False
    while not done:  # <- culprit
        pass
dist.all_reduce(t)  # <- waits
