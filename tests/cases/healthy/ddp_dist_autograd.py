"""DDP inside distributed autograd: its engine calls the group from a thread of C++, with no Python below.

ranks: 2
kind: healthy
"""

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import dist, rank, torch

rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size())
torch.manual_seed(rank)
net = torch.nn.Linear(2, 3)
model = DistributedDataParallel(net)
for _ in range(3):
    inputs = torch.rand(4, 2)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [model(inputs).norm()])
        found = dist_autograd.get_gradients(context)
    model.zero_grad()
    model(inputs).norm().backward()
    assert torch.allclose(found[net.weight], net.weight.grad)
rpc.shutdown()
dist.destroy_process_group()
