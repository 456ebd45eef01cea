"""Teaches: one rank raises, the others wait for it.

On a real cluster the last thing one sees is their timeout.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
for step in range(3):
    if rank == 2 and step == 1:
        raise ValueError("expected finite loss, got nan at step 1")  # <- culprit
    dist.all_reduce(t)  # <- waits
