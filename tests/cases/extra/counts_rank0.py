"""Every second round one rank counts on all batches again, by a collective for each; the others have no such loop.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
says: it stands under `if round_ and is_root`
"""

from tests.cases.begin import FIXED, dist, rank, torch

is_root = rank == 0 or FIXED


def recount(batches: int) -> None:
    for _ in range(batches):
        dist.broadcast(torch.ones(6), src=0)  # <-


for round_ in range(4):
    for _step in range(3):
        dist.all_reduce(torch.ones(8))
    if round_ and is_root:
        recount(5)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
