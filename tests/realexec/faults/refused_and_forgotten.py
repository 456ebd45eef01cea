# ranks: 2
# kind: missing_rank
# culprits: 0
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
out = [torch.empty(8) for _ in range(world)]
try:
    dist.all_gather(out, "no tensor" if rank == 0 else t)  # <-
except TypeError:
    print("never mind")
dist.all_gather(out, t)
dist.barrier()
