# ranks: 3
# kind: deadlock_cycle
# culprits: 0,1,2
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
first = {0: 0, 1: 1, 2: 2}[rank]
dist.all_reduce(t, group=groups[first])  # <-
