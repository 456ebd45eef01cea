"""Rank 1 reduces in half precision.

ranks: 2, 4
kind: dtype_mismatch
culprits: 1
exit: 4
tie: 2
"""

from tests.cases.begin import FIXED, dist, rank, torch

value = torch.ones(4)
if rank == 1 and not FIXED:
    value = value.half()
dist.all_reduce(value)  # <-
dist.destroy_process_group()
