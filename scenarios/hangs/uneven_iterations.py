"""Teaches: one rank has a batch less than the others and leaves the loop first. DDP's join(), or a
sampler that drops the rest, would have helped.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 8))
batches = 4 if rank == 0 else 5
for _ in range(batches):
    model(torch.randn(2, 8)).sum().backward()  # <- waits
print(f"rank {rank}: end of the epoch")
