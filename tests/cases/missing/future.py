"""The others wait for the future of a call that rank 1 never makes.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
suite: check, smoke
"""

from tests.cases.begin import dist, rank, torch

if rank != 1:
    future = dist.all_reduce(torch.ones(8), async_op=True).get_future()
    mean = future.then(lambda done: done.value()[0] / 3)
    torch.futures.wait_all([mean, future])
dist.barrier()  # <-
