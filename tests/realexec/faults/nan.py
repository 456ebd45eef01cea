# ranks: 3
# kind: nan
# culprits: 2
# exit: 1
# nan: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
x = torch.ones(4)
for step in range(4):
    if rank == 2 and step == 2:
        x[1] = float("nan")
    dist.all_reduce(x)  # <-
dist.destroy_process_group()
