# ranks: 2
# kind: p2p_unmatched
# culprits: 0,1
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
    dist.send(t, 1, tag=7)  # <-
else:
    dist.recv(t, 0, tag=8)  # <-
