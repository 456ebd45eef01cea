"""Rank 1 raises, and a finally block makes the step's next call on the way out.

ranks: 3
kind: rank_raised
culprits: 1
exit: 1
gpus: no, the rank is gone: what it launched on its way out is told before what it raised
"""

from tests.cases.begin import dist, rank, t


def total(tensor):
    dist.all_reduce(tensor)  # as in the steps before: known, but an exception is on its way  # <-


def report():
    total(t)


for step in range(4):
    try:
        if rank == 1 and step == 3:
            raise ValueError("no batch")
        dist.broadcast(t, 0)
    finally:
        report()
