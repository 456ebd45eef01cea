# ranks: 4
# kind: group_creation_order
# culprits: 3
# exit: 4
# cure: Compute the members at
"""One rank has another table of stages, so that it makes a group of other members at the same line."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
stages = [0, 1, 1, 2] if rank != 3 or "fixed" in sys.argv else [0, 1, 2, 2]
groups = {stage: dist.new_group([r for r in range(world) if stages[r] == stage]) for stage in sorted(set(stages))}  # <-
dist.all_reduce(torch.ones(2), group=groups[stages[rank]])
dist.destroy_process_group()
