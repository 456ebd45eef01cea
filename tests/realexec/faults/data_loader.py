# ranks: 2
# kind: host_stuck
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
import queue

samples = queue.Queue()
if rank == 1:
    samples.get()  # <-
dist.all_reduce(t)
