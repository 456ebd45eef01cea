"""Teaches: a rank that thinks it has nothing to do leaves with exit code 0, and the others wait for it."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
shard = list(range(3)) if rank < 3 else []
if not shard:
    sys.exit(0)  # <- culprit
dist.all_reduce(torch.ones(4))  # <- waits
