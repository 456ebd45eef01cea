"""Teaches: the ranks disagree about the source of a broadcast: one takes the last rank for the first."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
src = world_size - 1 if rank == 1 else 0
dist.broadcast(torch.ones(4), src=src)  # <- culprit
