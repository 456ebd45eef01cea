# ranks: 4
# kind: missing_rank
# culprits: 3
# exit: 3
# cure: `range(batches)`
"""Rank 3 validates on fewer batches, and goes on with the next epoch."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def validate():
    batches = 5 if rank != 3 or "fixed" in sys.argv else 3
    for _ in range(batches):
        dist.all_reduce(torch.rand(1))


for _epoch in range(2):
    for _step in range(3):
        dist.all_reduce(torch.ones(64))  # <-
    validate()
dist.destroy_process_group()
