# ranks: 3
# kind: rank_raised
# culprits: 1
# exit: 1
"""Uneven metrics: the last evaluation batch of rank 1 has fewer samples, and predictions are gathered."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for number in range(3):
    samples = 5 if rank == 1 and number == 2 and "fixed" not in sys.argv else 8
    predictions = torch.ones(samples, 4)
    parts = [torch.zeros(8, 4) for _ in range(world)]
    dist.all_gather(parts, predictions)  # <-
dist.barrier()
dist.destroy_process_group()
