"""Rank 1 leaves out the asynchronous call that rank 0 waits for at the end.

ranks: 2
kind: missing_rank
culprits: 1
exit: 3
"""

from tests.cases.begin import dist, rank, torch

group = dist.new_group()
work = dist.all_reduce(torch.ones(8), async_op=True) if rank == 0 else None
dist.all_reduce(torch.ones(8), group=group)  # <-
if work is not None:
    work.wait()
