# ranks: 3
# kind: host_stuck
# culprits: 1
# exit: 3
# hang_after: 1.5
# says: one call holds the GIL

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import re

if rank == 1:
    re.match(r"(a+)+$", "a" * 40 + "b")  # <-
dist.all_reduce(t)
