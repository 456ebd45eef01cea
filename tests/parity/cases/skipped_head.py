# ranks: 3
# kind: missing_rank
# culprits: 1
# exit: 3
"""A head that reduces its statistics is left out on the rank whose batch has no objects."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def statistics(x):
    both = torch.stack([x.mean(0), x.var(0)])
    dist.all_reduce(both)
    return both


for step in range(4):
    boxes = 0 if rank == 1 and step == 2 else 6
    statistics(torch.ones(4, 8))
    if boxes or "fixed" in sys.argv:
        statistics(torch.ones(4, 2))
    dist.all_reduce(torch.ones(64))  # <-
dist.destroy_process_group()
