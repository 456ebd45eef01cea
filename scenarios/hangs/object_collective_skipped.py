"""Teaches: broadcast_object_list on all ranks but one.

To the group it is two calls, of the size and of the bytes, and one rank makes neither.
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
config = [{"lr": 0.1}] if rank == 0 else [None]
if rank != 3:  # rank 3 reads its own file
    dist.broadcast_object_list(config, src=0)  # <- waits
dist.barrier()  # <- culprit
