# ranks: 3
# kind: rank_killed
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
import os
import signal

if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(t)
