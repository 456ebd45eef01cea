"""Teaches: a rank that polls a value which only a later collective would change.

Unlike spins.py its loop makes torch calls, so it looks alive.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
dist.all_reduce(t)
if rank == 1:
    while t[0] > 0:  # <- culprit
        pass
dist.all_reduce(t)  # <- waits
