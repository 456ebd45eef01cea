"""A call that torch refused on rank 0 is caught there, and never made again.

ranks: 2
kind: missing_rank
culprits: 0
exit: 3
"""

from tests.cases.begin import dist, rank, t, torch, world

out = [torch.empty(8) for _ in range(world)]
try:
    dist.all_gather(out, "no tensor" if rank == 0 else t)  # <-
except TypeError:
    print("never mind")
dist.all_gather(out, t)
dist.barrier()
