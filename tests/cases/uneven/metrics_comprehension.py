"""A dict comprehension averages each metric that this rank has; one rank has seen a class that the other has not.

ranks: 2
kind: uneven_iterations
culprits: 1
tie: 2
exit: 3
says: Make the keys of `sums` the same on every rank
"""

from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import FIXED, dist, rank, torch

net = DistributedDataParallel(torch.nn.Linear(4, 3))


def averaged(value):
    dist.barrier()  # <-
    dist.all_reduce(value)
    return value / 2


def averages(sums):
    return {key: averaged(value).item() for key, value in sums.items()}


for step in range(6):
    sums = {}
    loss = net(torch.rand(8, 4)).sum()
    for name in ("car", "person", "sign"):
        if name != "sign" or rank == 0 or step < 4 or FIXED:
            sums[name] = loss.detach()
    loss.backward()  # <-
    if step % 2 == 0:
        averages(sums)
dist.destroy_process_group()
