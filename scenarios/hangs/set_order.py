"""Teaches: an order that nobody fixed. The parameters are reduced in the order of a Python set of names,
which differs from process to process (PYTHONHASHSEED). Here the difference is written down.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
shapes = {"weight": (4, 4), "bias": (4,)}
names = sorted(shapes, reverse=rank == 2)  # stands for `for name in {"weight", "bias"}`
for name in names:
    dist.all_reduce(torch.ones(shapes[name]))  # <- culprit
