# ranks: 3
# kind: straggler
# culprits: 1
# exit: 0
# straggler_after: 0.8

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
import time

for step in range(4):
    if rank == 1:
        time.sleep(2.5 if step == 3 else 0.05)  # <- while the others wait
    dist.all_reduce(t)  # <- afterwards
dist.destroy_process_group()
