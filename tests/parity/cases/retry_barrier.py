# ranks: 3
# kind: uneven_iterations
# culprits: 0
# exit: 3
"""Rank 0 retries a save that failed after its barrier: it comes to the barrier once more."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def save(failures):
    dist.barrier()  # <-
    if failures:
        failures.pop()
        raise OSError("quota exceeded")


failures = [1] if rank == 0 and "fixed" not in sys.argv else []
for _ in range(3):
    dist.all_reduce(torch.ones(4))
    while True:
        try:
            save(failures)
            break
        except OSError:
            pass
dist.destroy_process_group()
