# ranks: 2
# kind: deadlock_cycle
# culprits: 0,1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
work = dist.irecv(t, src=1 - rank)  # <-
work.wait()
dist.send(t, 1 - rank)
