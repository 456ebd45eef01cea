# ranks: 3
# kind: uneven_iterations
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
batches = 6 if rank == 0 else 9
for _ in range(batches):
    dist.all_reduce(t)
dist.barrier()
dist.destroy_process_group()
