# ranks: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 0:
    for n in range(5):
        dist.send(torch.ones(n + 1), 1)
    for _ in range(3):
        dist.recv(torch.ones(2), 2)
elif rank == 1:
    for n in range(5):
        dist.recv(torch.ones(n + 1), 0)
else:
    for _ in range(3):
        dist.send(torch.ones(2), 0)
dist.barrier()
dist.all_reduce(t)
dist.destroy_process_group()
