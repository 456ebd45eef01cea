"""Ranks make the same calls on lines of their own.

ranks: 2
kind: healthy
"""

import time

from tests.cases.begin import dist, rank, t, torch

for step in range(20):
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
    if step % 2:
        dist.broadcast(t, 0)
time.sleep(0.6)
dist.destroy_process_group()
