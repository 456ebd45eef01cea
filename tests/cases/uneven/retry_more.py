"""A step with a collective is tried again on the rank whose log could not be written: it makes the call once more.

ranks: 3
kind: uneven_iterations
culprits: 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch

failures = [1] if rank == 1 and not FIXED else []


def train_step(step):
    dist.all_reduce(torch.ones(3))  # <-
    if step == 2 and failures:
        failures.pop()
        raise OSError("stale file handle")


for step in range(5):
    for _ in range(3):
        try:
            train_step(step)
            break
        except OSError as error:
            print("again", error)
dist.broadcast(torch.ones(7), src=0)
dist.destroy_process_group()
