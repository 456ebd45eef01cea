"""One rank alone runs out of memory, halves its micro-batch and tries again, with twice as many backward passes.

ranks: 2
kind: missing_rank | uneven_iterations
culprits: 1
exit: 3
says: and went through the try again
"""

from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import FIXED, dist, rank, torch

net = DistributedDataParallel(torch.nn.Linear(4, 1))
size = 4


def micro_batches(batch, step):
    if rank == 1 and step == 2 and size == 4 and not FIXED:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for micro in batch.split(size):
        net(micro).sum().backward()  # <-


for step in range(5):
    while True:
        try:
            micro_batches(torch.rand(8, 4), step)
            break
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size //= 2
    dist.all_gather([torch.zeros(1) for _ in range(2)], torch.zeros(1))  # <-
dist.destroy_process_group()
