"""Asynchronous calls on two groups, in opposite orders.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, rank, torch

a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
for _step in range(10):
    first, second = (a, b) if rank == 0 else (b, a)
    works = [dist.all_reduce(torch.ones(1000), group=first, async_op=True)]
    works.append(dist.all_reduce(torch.ones(1000), group=second, async_op=True))
    for work in works:
        work.wait()
dist.destroy_process_group()
