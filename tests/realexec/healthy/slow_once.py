# ranks: 2

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import time

if rank == 1:
    time.sleep(3)
dist.all_reduce(t)
dist.barrier()
dist.destroy_process_group()
