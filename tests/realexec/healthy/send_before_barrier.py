# ranks: 2

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 0:
    dist.send(t, 1)
    dist.barrier()
else:
    dist.recv(t, 0)
    dist.barrier()
dist.monitored_barrier()
dist.destroy_process_group()
