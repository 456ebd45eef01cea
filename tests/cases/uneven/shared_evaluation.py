"""The last evaluation set has one batch for rank 0 and none for the others, under a condition that all meet.

ranks: 3
kind: uneven_iterations
culprits: 0
exit: 3
says: `batches`
"""

from tests.cases.begin import FIXED, dist, rank, torch


def evaluate(batches: list[int]) -> None:
    for _ in batches:
        dist.all_reduce(torch.ones(3))  # <-


for epoch in range(3):
    dist.all_reduce(torch.ones(8))
    if epoch != 1:
        evaluate([0] * (1 if rank == 0 or FIXED else 0))
dist.barrier()
dist.destroy_process_group()
