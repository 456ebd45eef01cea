"""What most programs begin with: the default group, and three steps that go well."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

__all__ = ["FIXED", "F", "dist", "nn", "rank", "t", "torch", "world"]

FIXED = "fixed" in sys.argv
"""Whether the program is to run without its fault."""

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
