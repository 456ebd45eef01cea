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
    work = dist.isend(torch.ones(4), 1)
    dist.barrier()
    work.wait()
else:
    dist.barrier()
    dist.recv(torch.ones(4), 0)
dist.destroy_process_group()
