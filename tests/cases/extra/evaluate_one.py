"""Rank 0 alone evaluates the DDP model through its wrapper (forward in train mode broadcasts buffers).

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, dist, rank, torch

model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
for _ in range(2):
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    if rank == 0 or FIXED:
        with torch.no_grad():
            model(torch.randn(4, 8))  # <-
dist.barrier()
dist.destroy_process_group()
