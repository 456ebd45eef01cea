"""Teaches: the tutorial's example: all ranks reduce, but one has another shape. With
TORCH_DISTRIBUTED_DEBUG=DETAIL torch itself compares the calls of a real run, at a price.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(20 if rank == 1 else 10))  # <- culprit
