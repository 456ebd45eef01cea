"""Uneven metrics: the last evaluation batch of rank 1 has fewer samples, and predictions are gathered.

ranks: 3
kind: rank_raised
culprits: 1
exit: 1
"""

from tests.cases.begin import FIXED, dist, rank, torch, world

for number in range(3):
    samples = 5 if rank == 1 and number == 2 and not FIXED else 8
    predictions = torch.ones(samples, 4)
    parts = [torch.zeros(8, 4) for _ in range(world)]
    dist.all_gather(parts, predictions)  # <-
dist.barrier()
dist.destroy_process_group()
