# ranks: 3
# kind: root_mismatch
# culprits: 1
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
dist.broadcast(t, src=1 if rank == 1 else 0)  # <-
dist.barrier()
