"""A helper averages the loss for the log, on rank 0 alone; the others are in the loop over the gradients.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
"""

from tests.cases.begin import FIXED, dist, rank, torch


def log(loss):
    if rank == 0 or FIXED:
        dist.all_reduce(loss)  # <-


grads = [torch.ones(8), torch.ones(2)]
for step in range(5):
    for grad in grads:
        dist.all_reduce(grad)
    if step % 3 == 2:
        log(torch.ones(1))
dist.destroy_process_group()
