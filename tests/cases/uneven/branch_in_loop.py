"""A rank leaves one round's call out, by a condition that it decides for itself, and ends before the others.

ranks: 2
kind: uneven_iterations
culprits: 1
exit: 3
says: unconditionally
"""

from tests.cases.begin import FIXED, dist, rank, torch

steps = 6
for step in range(steps):
    busy = rank == 1 and step == 4 and not FIXED
    if busy:
        continue_at = step + 1
    else:
        dist.all_reduce(torch.ones(3))  # <-
if rank == 0 or FIXED:
    dist.broadcast(torch.ones(2), src=0)
dist.destroy_process_group()
