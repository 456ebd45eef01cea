"""`if rank == 0` downloads, with a barrier inside; the others go on to the broadcast of the weights.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
"""

from tests.cases.begin import FIXED, dist, rank, torch

weights = torch.zeros(32)
if rank == 0 or FIXED:
    weights += 1
    dist.barrier()  # <-
dist.broadcast(weights, src=0)
for _ in range(3):
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
