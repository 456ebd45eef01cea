# ranks: 3
# kind: p2p_unmatched
# culprits: 1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank == 0:
    dist.recv(t, src=1)
dist.barrier()  # <-
