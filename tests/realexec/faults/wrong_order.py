# ranks: 3
# kind: wrong_order
# culprits: 2
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
a, b = torch.ones(4), torch.ones(4)
if rank == 2:
    dist.broadcast(b, 0)  # <-
    dist.all_reduce(a)
else:
    dist.all_reduce(a)
    dist.broadcast(b, 0)
dist.all_reduce(t)
