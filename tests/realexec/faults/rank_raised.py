# ranks: 3
# kind: rank_raised
# culprits: 1
# exit: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 1:
    raise ValueError("a bad shard")  # <-
dist.all_reduce(t)
