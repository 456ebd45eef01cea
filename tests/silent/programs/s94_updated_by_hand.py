"""No optimizer: the program updates its parameters, and LayerNorm's gradients are not reduced. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(w)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(w)[r]


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.norm = nn.LayerNorm(8)
        torch.manual_seed(10 + r)
        s.column = nn.Linear(8, 4, bias=False)

    def forward(s, x):
        return s.column(Gather.apply(s.norm(x.chunk(w)[r])))


m = M()
torch.manual_seed(3)
for s in range(4):
    m(torch.randn(8, 8)).pow(2).sum().backward()
    if FIX:
        for p in m.norm.parameters():
            dist.all_reduce(p.grad)
    with torch.no_grad():
        for p in m.parameters():
            p -= 0.01 * p.grad
            p.grad = None
dist.destroy_process_group()
