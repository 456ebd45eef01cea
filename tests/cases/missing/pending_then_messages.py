"""Rank 1 leaves out an asynchronous all_reduce that the others wait for behind messages.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
"""

from tests.cases.begin import dist, rank, torch, world

works = [] if rank == 1 else [dist.all_reduce(torch.ones(8), async_op=True)]
works += [dist.isend(torch.ones(16), (rank + 1) % world), dist.irecv(torch.zeros(16), (rank - 1) % world)]  # <-
for work in works:
    work.wait()
