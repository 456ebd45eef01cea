# ranks: 3
# kind: extra_collective
# culprits: 0
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
for step in range(4):
    dist.all_reduce(t)
    if rank == 0 and step == 2:
        dist.broadcast(torch.ones(2), 0)  # <-
dist.barrier()
