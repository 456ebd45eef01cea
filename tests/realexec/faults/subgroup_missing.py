# ranks: 4
# kind: uneven_iterations
# culprits: 3
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
a = dist.new_group([0, 1], group_desc="pair_a")
b = dist.new_group([2, 3], group_desc="pair_b")
mine = a if rank < 2 else b
for step in range(3):
    if rank == 3 and step == 2:
        break
    dist.all_reduce(t, group=mine)
dist.barrier()  # <-
