"""Gradient accumulation with no_sync(): the rank's own number of batches decides which one is the last.

ranks: 3
kind: uneven_iterations
culprits: 0
exit: 3
"""

import contextlib

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, dist, rank, torch

model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.ones(4, 8)] * (13 if rank == 0 and not FIXED else 9)
for number, batch in enumerate(batches):
    last = (number + 1) % 4 == 0 or number + 1 == len(batches)
    with contextlib.nullcontext() if last else model.no_sync():
        model(batch).sum().backward()  # <-
    if last:
        optimizer.step()
        optimizer.zero_grad()
        norm = torch.ones(1)
        dist.all_reduce(norm)
dist.barrier()
dist.destroy_process_group()
