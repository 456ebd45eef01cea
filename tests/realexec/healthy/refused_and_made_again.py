# ranks: 2

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
places = [torch.empty(8) for _ in range(2)]
for step in range(3):
    try:
        dist.all_gather(places[:1] if (rank, step) == (1, 1) else places, t)  # refused where it is made
    except (RuntimeError, ValueError):
        dist.all_gather(places, t)
    try:
        dist.new_group([0, 7] if rank == 0 else [0, 1])
    except ValueError:
        dist.new_group([0, 1])
dist.barrier()
dist.destroy_process_group()
