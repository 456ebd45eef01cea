# ranks: 3
# kind: missing_rank
# culprits: 1
# exit: 3
"""Rank 1 resumes from a newer checkpoint, at step 6 where the others are at 4; every third step evaluates."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
start = 6 if rank == 1 or "fixed" in sys.argv else 4
for step in range(start, 12):
    grad = torch.ones(32)
    dist.all_reduce(grad)  # <-
    if step % 3 == 2:
        scores = [torch.zeros(4) for _ in range(dist.get_world_size())]
        dist.all_gather(scores, torch.ones(4))
dist.barrier()
dist.destroy_process_group()
