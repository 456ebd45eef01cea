"""Teaches: the message is sent, the receive is posted, and they do not meet: the tags differ."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    dist.send(torch.ones(4), dst=1, tag=7)  # <- culprit
elif rank == 1:
    dist.recv(torch.zeros(4), src=0, tag=8)  # <- culprit too
