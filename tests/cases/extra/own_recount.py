"""The same as counts_rank0, under a condition that does not say that it asks for the rank.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
says: Agree on `round_ and again`
"""

from tests.cases.begin import FIXED, dist, rank, torch

again = rank == 0 or FIXED


def recount(batches: int) -> None:
    for _ in range(batches):
        dist.broadcast(torch.ones(6), src=0)  # <-


for round_ in range(4):
    for _step in range(3):
        dist.all_reduce(torch.ones(8))
    if round_ and again:
        recount(5)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
