"""Rank 0 retries a save that failed after its barrier: it comes to the barrier once more.

ranks: 3
kind: uneven_iterations
culprits: 0
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch


def save(failures):
    dist.barrier()  # <-
    if failures:
        failures.pop()
        raise OSError("quota exceeded")


failures = [1] if rank == 0 and not FIXED else []
for _ in range(3):
    dist.all_reduce(torch.ones(4))
    while True:
        try:
            save(failures)
            break
        except OSError:
            pass
dist.destroy_process_group()
