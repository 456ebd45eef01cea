# ranks: 4
# kind: uneven_iterations
# culprits: 2
# exit: 3
# cure: Make no collective calls in an except block
"""One rank runs out of memory after its backward pass, and makes another with half the batch in the except block."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
net = DistributedDataParallel(torch.nn.Linear(4, 1))


def train_step(size, fails):
    net(torch.rand(size, 4)).sum().backward()  # <-
    if fails:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


for step in range(4):
    try:
        train_step(8, rank == 2 and step == 1 and "fixed" not in sys.argv)
    except torch.OutOfMemoryError:
        train_step(4, False)
dist.barrier()
dist.destroy_process_group()
