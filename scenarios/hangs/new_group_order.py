"""Teaches: all ranks make the same two groups, one of them in another order."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
pairs = [[0, 1], [2, 3]]
if rank == 3:
    pairs.reverse()
groups = [dist.new_group(pair) for pair in pairs]  # <- culprit
mine = groups[0] if rank in pairs[0] else groups[1]
dist.all_reduce(torch.ones(4), group=mine)
