"""Teaches: a send of four numbers into a receive of eight."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    dist.send(torch.ones(4), dst=1)  # <- culprit
elif rank == 1:
    dist.recv(torch.zeros(8), src=0)
