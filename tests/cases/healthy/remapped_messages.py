"""The program gives its processes other ranks than the launcher; by the launcher's, two would wait for each other.

ranks: 3
kind: healthy
"""

import os
import time

import torch
import torch.distributed as dist

world = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=world - 1 - int(os.environ["RANK"]), world_size=world)
rank = dist.get_rank()
t = torch.full((4,), float(rank))
if rank == 0:
    time.sleep(1.5)
else:
    dist.recv(t, src=rank - 1)
if rank < world - 1:
    dist.send(t, dst=rank + 1)
dist.barrier()
dist.destroy_process_group()
