"""Rank 2 reduces two gradients of one shape in the other order, which no call shows.

ranks: 3
kind: wrong_order
culprits: 2
exit: 4
"""

import time

from tests.cases.begin import dist, rank, torch

grads = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)}


def reduce_a():
    dist.all_reduce(grads["a"])


def reduce_b():
    dist.all_reduce(grads["b"])


for step in range(5):
    order = [reduce_a, reduce_b]
    if rank == 2 and step == 3:
        order.reverse()
    for reduce in order:
        reduce()
dist.barrier()
time.sleep(1.5)
dist.barrier()
