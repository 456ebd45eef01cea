"""Rank 1 resumes from a newer checkpoint, at step 6 where the others are at 4; every third step evaluates.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch

start = 6 if rank == 1 or FIXED else 4
for step in range(start, 12):
    grad = torch.ones(32)
    dist.all_reduce(grad)  # <-
    if step % 3 == 2:
        scores = [torch.zeros(4) for _ in range(dist.get_world_size())]
        dist.all_gather(scores, torch.ones(4))
dist.barrier()
dist.destroy_process_group()
