# ranks: 2
# kind: uneven_iterations
# culprits: 1
# exit: 3
# cure: unconditionally
"""A rank leaves one round's call out, by a condition that it decides for itself, and ends before the others."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
steps = 6
for step in range(steps):
    busy = rank == 1 and step == 4 and "fixed" not in sys.argv
    if busy:
        continue_at = step + 1
    else:
        dist.all_reduce(torch.ones(3))  # <-
if rank == 0 or "fixed" in sys.argv:
    dist.broadcast(torch.ones(2), src=0)
dist.destroy_process_group()
