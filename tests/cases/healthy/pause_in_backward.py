"""A rank pauses between two buckets of a backward pass.

ranks: 2
kind: healthy
"""

import time

from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import dist, nn, rank, torch


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if rank == 0:
            time.sleep(3)
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(Pause.apply(self.a(x)))


model = DistributedDataParallel(Net(), bucket_cap_mb=1e-5)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
dist.barrier()
dist.destroy_process_group()
