# ranks: 4
# kind: extra_collective
# culprits: 2,3
# exit: 4
# cure: Pass the same group= on every rank
"""Ranks that are no members of a group pass None for it, which is the world."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1])
mine = group if rank < 2 else None
if rank < 2 or "fixed" not in sys.argv:
    dist.all_reduce(torch.ones(2), group=mine)  # <-
dist.barrier()
dist.destroy_process_group()
