# ranks: 2

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    try:
        os.execv("/no/such/program", ["program"])
    except OSError:
        os.execlp(sys.executable, sys.executable, "-S", "-c", "import time; time.sleep(0.5)")
