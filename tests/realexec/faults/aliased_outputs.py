# ranks: 2
# kind: aliased_outputs
# culprits: 0,1
# exit: 0

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_gather([torch.zeros(8)] * world, t)  # <-
dist.barrier()
dist.destroy_process_group()
