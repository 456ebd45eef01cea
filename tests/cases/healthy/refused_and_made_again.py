"""Calls that torch refuses on one rank are made again, rightly.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, rank, t, torch

places = [torch.empty(8) for _ in range(2)]
for step in range(3):
    try:
        dist.all_gather(places[:1] if (rank, step) == (1, 1) else places, t)  # refused where it is made
    except (RuntimeError, ValueError):
        dist.all_gather(places, t)
    try:
        dist.new_group([0, 7] if rank == 0 else [0, 1])
    except ValueError:
        dist.new_group([0, 1])
dist.barrier()
dist.destroy_process_group()
