"""Teaches: a recv that nobody sends to.

The culprit is the rank that does not send, not the one that waits.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.zeros(4)
if rank == 1:
    dist.recv(t, src=0)  # <- waits
