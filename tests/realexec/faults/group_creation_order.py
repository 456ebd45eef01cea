# ranks: 3
# kind: group_creation_order
# culprits: 2
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
wanted = [[0, 1, 2], [1, 2]] if rank != 2 else [[1, 2], [0, 1, 2]]
for ranks in wanted:
    dist.new_group(ranks)  # <-
dist.barrier()
