"""One rank runs out of memory after its backward pass, and makes another with half the batch in the except block.

ranks: 4
kind: uneven_iterations
culprits: 2
exit: 3
says: Make no collective calls in an except block
"""

from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import FIXED, dist, rank, torch

net = DistributedDataParallel(torch.nn.Linear(4, 1))


def train_step(size, fails):
    net(torch.rand(size, 4)).sum().backward()  # <-
    if fails:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


for step in range(4):
    try:
        train_step(8, rank == 2 and step == 1 and not FIXED)
    except torch.OutOfMemoryError:
        train_step(4, False)
dist.barrier()
dist.destroy_process_group()
