"""Gradients are accumulated over a number of batches that each rank computes from its own memory: 2 or 4.

ranks: 3
kind: uneven_iterations
culprits: 0
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch

micro = 4 if rank == 0 or FIXED else 2
for _ in range(3):
    for batch in range(8):
        if (batch + 1) % micro == 0:
            dist.all_reduce(torch.ones(16))
    loss = torch.ones(1)
    dist.all_reduce(loss)  # <-
dist.destroy_process_group()
