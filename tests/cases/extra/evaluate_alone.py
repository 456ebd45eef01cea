"""Only rank 0 evaluates, through the function that training uses.

ranks: 2, 4
kind: extra_collective
culprits: 0
exit: 4
"""

from tests.cases.begin import FIXED, dist, rank, torch, world


def mean(value):
    dist.all_reduce(value)  # <-
    return value / world


def train_step():
    mean(torch.ones(4))


def evaluate():
    mean(torch.ones(4))


for step in range(6):
    train_step()
    if step == 3 and (rank == 0 or FIXED):
        evaluate()
dist.barrier()
dist.destroy_process_group()
