# ranks: 2
# kind: splits_mismatch
# culprits: 0
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
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [1, 3])  # <-
else:
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 2], [2, 2])  # <-
dist.barrier()
