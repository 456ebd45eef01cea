"""Teaches: a NaN of one rank is on all ranks after the next all_reduce; the guard names the rank that had it first."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
loss = torch.tensor([float(rank)])
for step in range(3):
    if rank == 2 and step == 1:
        loss = loss / 0.0 - loss / 0.0  # an empty batch
    dist.all_reduce(loss)  # <- culprit
