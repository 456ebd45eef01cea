"""A collate function gives None for a batch of broken samples, on one rank.

ranks: 4
kind: uneven_iterations
culprits: 1
exit: 3
says: Skip the round on all ranks or on none: all_reduce whether any rank does. `batch is None`
"""

from tests.cases.begin import FIXED, dist, rank, torch

batches = [torch.ones(2) for _ in range(5)]
if rank == 1 and not FIXED:
    batches[2] = None
for batch in batches:
    if batch is None:
        continue
    dist.all_reduce(batch)
dist.barrier()  # <-
dist.destroy_process_group()
