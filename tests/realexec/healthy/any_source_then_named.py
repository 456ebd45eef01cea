# ranks: 3
# What came from any source does not count among the messages from one rank.

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    for _ in range(2):
        dist.recv(torch.zeros(1))
else:
    dist.send(torch.ones(1), 0)
dist.barrier()
if rank == 0:
    dist.recv(torch.zeros(4), src=1)
elif rank == 1:
    dist.send(torch.ones(4), 0)
dist.barrier()
