"""Tensor parallel by functions: the gradient of a column-parallel input is not reduced. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


class G(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(c, d):
        return d


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        return x.view_as(x)

    @staticmethod
    def backward(c, d):
        d = d.clone()
        dist.all_reduce(d)
        return d


torch.manual_seed(0)
pre = nn.Linear(16, 16)
a, b = torch.randn(32, 16) * 0.2, torch.randn(4, 32) * 0.2
w1, w2 = nn.Parameter(a.chunk(w)[r].clone()), nn.Parameter(b.chunk(w, 1)[r].clone())
o = torch.optim.SGD([*pre.parameters(), w1, w2], 0.1)
g = torch.Generator().manual_seed(9)
for s in range(6):
    x, y = torch.randn(8, 16, generator=g), torch.randint(4, (8,), generator=g)
    h = pre(x)
    if FIX:
        h = Fn.apply(h)
    F.cross_entropy(G.apply(F.relu(F.linear(h, w1)) @ w2.t()), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
