"""Rank 2 resumes from a newer checkpoint: an epoch less, of two steps each.

ranks: 4
kind: uneven_iterations
culprits: 2
exit: 3
says: Begin at the same step on every rank
"""

from tests.cases.begin import FIXED, dist, rank, torch

start_epoch = 3 if rank == 2 and not FIXED else 2
for _epoch in range(start_epoch, 5):
    for _step in range(2):
        dist.all_reduce(torch.ones(10))
    dist.reduce(torch.zeros(1), dst=0)
    dist.barrier()  # <-
dist.destroy_process_group()  # <- on gloo the barrier may let it through
