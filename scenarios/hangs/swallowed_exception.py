"""Teaches: an exception that one rank catches and forgets, together with the collective that was to
follow. Nothing is printed; that rank has made one call less when its loop ends.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
for step in range(3):
    try:
        if rank == 1 and step == 2:
            raise OSError("could not read batch 2")
        dist.all_reduce(t)  # <- waits
    except OSError:
        pass  # "we can afford to lose a batch"
