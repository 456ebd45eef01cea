"""Teaches: a rank that leaves out one call is one call ahead from then on. What meets is its next call
and the others' call before; the report names the call that was left out, not the meeting.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
for step in range(3):
    if not (rank == 1 and step == 1):
        dist.all_reduce(t)  # <- waits
    dist.broadcast(t, src=0)  # <- culprit
dist.barrier()
