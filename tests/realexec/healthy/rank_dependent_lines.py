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

for step in range(20):
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
    if step % 2:
        dist.broadcast(t, 0)
time.sleep(0.6)
dist.destroy_process_group()
