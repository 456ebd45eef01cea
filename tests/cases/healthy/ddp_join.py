"""Ranks have unlike numbers of batches inside of join().

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import dist, nn, rank, torch

model = DistributedDataParallel(nn.Linear(8, 8))
with model.join():
    for _ in range(3 + 2 * rank):
        model(torch.ones(2, 8)).sum().backward()
with model.join(divide_by_initial_world_size=False):  # its C++ waits for a handle that Python has dropped
    for _ in range(3 + 2 * rank):
        model(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
