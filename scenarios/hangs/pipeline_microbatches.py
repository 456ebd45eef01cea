"""Teaches: a pipeline written by hand whose last stage expects one microbatch more than the others
send.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
microbatches = 4 if rank == world_size - 1 else 3
activation = torch.zeros(8, 16)
for _ in range(microbatches):
    if rank > 0:
        dist.recv(activation, src=rank - 1)  # <- waits
    if rank < world_size - 1:
        dist.send(activation + 1, dst=rank + 1)  # <- culprit
