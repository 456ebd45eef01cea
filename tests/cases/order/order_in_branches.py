"""Rank 1's branch makes the two calls in the other order.

ranks: 3
kind: wrong_order
culprits: 1
exit: 4
"""

from tests.cases.begin import dist, rank, torch

a, b = torch.ones(8), torch.zeros(8)
for step in range(4):
    if (rank, step) == (1, 2):
        dist.all_reduce(b)  # <-
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)
