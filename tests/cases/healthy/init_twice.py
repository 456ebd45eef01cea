"""The default group is destroyed and made again.

ranks: 2
kind: healthy
"""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
dist.destroy_process_group()
# A port of its own: on the same one, rank 1 may still meet the first store's server (so it is without a guard).
os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
dist.init_process_group("gloo")
dist.all_reduce(t)
for _ in range(2):
    dist.broadcast(t, 0)
dist.destroy_process_group()
