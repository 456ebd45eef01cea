# ranks: 3
# kind: rank_killed
# culprits: 0
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import ctypes

if rank == 0:
    ctypes.string_at(0)  # <-
dist.all_reduce(t)
