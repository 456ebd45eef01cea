# ranks: 2
# kind: deadlock_cycle
# culprits: 0,1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
a = dist.new_group([0, 1])
b = dist.new_group([0, 1])
for group in (a, b) if rank == 0 else (b, a):
    dist.all_reduce(t, group=group)  # <-
