# ranks: 2
# kind: p2p_size_mismatch
# culprits: 0,1
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 0:
    dist.send(torch.ones(16), 1)  # <-
else:
    dist.recv(torch.ones(8), 0)  # <-
dist.barrier()
