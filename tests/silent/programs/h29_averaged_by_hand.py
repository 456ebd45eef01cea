"""No optimizer: each rank updates its replica, and the replicas are averaged before the next step. ranks: 2"""

import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
torch.manual_seed(1 + r)
for s in range(4):
    m(torch.randn(8, 8)).pow(2).mean().backward()
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(p.grad, alpha=0.01)
            p.grad.zero_()
            dist.all_reduce(p)
            p /= w
dist.destroy_process_group()
