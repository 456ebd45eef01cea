# ranks: 3
# kind: process_frozen
# culprits: 1
# exit: 3
# hang_after: 1.5

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

if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # <-
dist.all_reduce(t)
