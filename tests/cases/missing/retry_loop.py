"""A retry loop swallows what a flaky reader raises between two collectives: rank 1 makes the first one twice.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
gpus: no, the host is ahead of its kernels: later calls show one too many
"""

from tests.cases.begin import FIXED, dist, rank, torch

failures = [1]


def read(step):
    if rank == 1 and step == 2 and failures and not FIXED:
        failures.pop()
        raise OSError("stale file handle")


def step_once(step):
    size = torch.ones(1)
    dist.all_reduce(size)  # <-
    read(step)
    dist.all_reduce(torch.ones(16))


for step in range(4):
    for _ in range(3):
        try:
            step_once(step)
            break
        except OSError:
            continue
dist.barrier()
dist.destroy_process_group()
