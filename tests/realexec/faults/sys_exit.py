# ranks: 3
# kind: rank_exited
# culprits: 2
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import sys

if rank == 2:
    sys.exit(5)
dist.all_reduce(t)
