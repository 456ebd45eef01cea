"""Teaches: six steps of computing and reducing; the files beside it make some ranks slow, late, or gone."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.ones(192, 192)
for _step in range(6):
    gradient = weight @ weight
    dist.all_reduce(gradient)  # <- step
if rank == 0:
    print("done")
dist.destroy_process_group()
