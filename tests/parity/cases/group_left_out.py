# ranks: 4
# kind: group_creation_order
# culprits: 3
# exit: 4
# cure: Call new_group on every rank of the world
"""One rank leaves out one of three new_group calls: its second is the others' second, and the third never comes."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = []
for layer in range(3):
    if rank == 3 and layer == 1 and "fixed" not in sys.argv:
        continue
    groups.append(dist.new_group([0, 1, 2, 3]))
dist.all_reduce(torch.ones(2), group=groups[-1])  # <-
dist.barrier()
dist.destroy_process_group()
