"""Teaches: every rank sends to its right neighbour and then receives from its left: a circle of all."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % world_size, (rank - 1) % world_size
dist.send(torch.ones(4), dst=right)  # <- culprit
dist.recv(torch.zeros(4), src=left)
