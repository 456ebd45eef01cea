# ranks: 3
# kind: rank_raised
# culprits: 0
# exit: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
out = torch.zeros(2)
dist.scatter(out, [torch.ones(2)] * 2 if rank == 0 else None, src=0)  # <-
dist.barrier()
