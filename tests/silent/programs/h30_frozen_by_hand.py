"""Two models without an optimizer: every second backward pass updates one of them. ranks: 2"""

import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
models = [nn.Linear(8, 8), nn.Linear(8, 4)]
torch.manual_seed(1 + r)
for s in range(8):
    models[1](models[0](torch.randn(8, 8))).pow(2).mean().backward()
    for p in models[s % 2].parameters():
        dist.all_reduce(p.grad)
        p.data = p.data - 0.01 * p.grad / w
    for m in models:
        m.zero_grad()
dist.destroy_process_group()
