# ranks: 4
# kind: uneven_iterations
# culprits: 3
# exit: 3
# cure: Build the same model on every rank
"""One rank builds a layer less, and the weights are broadcast one by one."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = 1 if rank == 3 and "fixed" not in sys.argv else 2
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
for parameter in net.parameters():
    dist.broadcast(parameter.data, src=0)
dist.barrier()  # <-
dist.destroy_process_group()
