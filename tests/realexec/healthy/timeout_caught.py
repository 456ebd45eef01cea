# ranks: 3

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
group = dist.new_group(timeout=timedelta(seconds=0.8))
if rank == 2:
    time.sleep(2)
else:
    try:
        dist.all_reduce(t, group=group)
    except RuntimeError as error:
        print(f"rank {rank}: {type(error).__name__}")
dist.barrier()
