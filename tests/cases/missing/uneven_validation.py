"""Rank 3 validates on fewer batches, and goes on with the next epoch.

ranks: 4
kind: missing_rank
culprits: 3
exit: 3
says: `range(batches)`
gpus: no, the host is ahead of its kernels: later calls show another order
"""

from tests.cases.begin import FIXED, dist, rank, torch


def validate():
    batches = 5 if rank != 3 or FIXED else 3
    for _ in range(batches):
        dist.all_reduce(torch.rand(1))


for _epoch in range(2):
    for _step in range(3):
        dist.all_reduce(torch.ones(64))  # <-
    validate()
dist.destroy_process_group()
