"""Rank 2 comes later than the group's timeout allows.

ranks: 3
kind: missing_rank
culprits: 2
exit: 3
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=1.2))
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 2:
    time.sleep(3)  # <-
dist.all_reduce(t)
