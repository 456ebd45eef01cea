# ranks: 3
# kind: extra_collective
# culprits: 0
# exit: 4
"""A helper averages the loss for the log, on rank 0 alone; the others are in the loop over the gradients."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def log(loss):
    if rank == 0 or "fixed" in sys.argv:
        dist.all_reduce(loss)  # <-


grads = [torch.ones(8), torch.ones(2)]
for step in range(5):
    for grad in grads:
        dist.all_reduce(grad)
    if step % 3 == 2:
        log(torch.ones(1))
dist.destroy_process_group()
