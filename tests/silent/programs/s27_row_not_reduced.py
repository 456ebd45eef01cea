"""The row-parallel product is never all-reduced; all parameters are shards. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


class _Gather(torch.autograd.Function):  # all-gather forward, reduce-scatter backward (sequence parallel)
    @staticmethod
    def forward(c, x, g):
        c.g = g
        n = dist.get_world_size(g)
        o = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(o, x.contiguous(), group=g)
        return torch.cat(o)

    @staticmethod
    def backward(c, d):
        n, i = dist.get_world_size(c.g), dist.get_rank(c.g)
        d = d.contiguous().clone()
        dist.all_reduce(d, group=c.g)
        return d.chunk(n)[i].contiguous(), None


class _Scatter(torch.autograd.Function):  # reduce-scatter forward, all-gather backward
    @staticmethod
    def forward(c, x, g):
        c.g = g
        n, i = dist.get_world_size(g), dist.get_rank(g)
        x = x.contiguous().clone()
        dist.all_reduce(x, group=g)
        return x.chunk(n)[i].contiguous()

    @staticmethod
    def backward(c, d):
        o = [torch.empty_like(d) for _ in range(dist.get_world_size(c.g))]
        dist.all_gather(o, d.contiguous(), group=c.g)
        return torch.cat(o), None


class _F(torch.autograd.Function):  # Megatron's f: identity forward, all-reduce backward
    @staticmethod
    def forward(c, x, g):
        c.g = g
        return x.view_as(x)

    @staticmethod
    def backward(c, d):
        d = d.contiguous().clone()
        dist.all_reduce(d, group=c.g)
        return d, None


class _G(torch.autograd.Function):  # Megatron's g: all-reduce forward, identity backward
    @staticmethod
    def forward(c, x, g):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=g)
        return x

    @staticmethod
    def backward(c, d):
        return d, None


def part(t, dim, n, i):
    return nn.Parameter(t.chunk(n, dim)[i].clone())


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        a, b = torch.randn(32, 16) * 0.2, torch.randn(16, 32) * 0.2
        s.w1, s.w2 = part(a, 0, w, r), part(b, 1, w, r)

    def forward(s, x):
        y = F.gelu(F.linear(_F.apply(x, None), s.w1)) @ s.w2.t()
        return x + (_G.apply(y, None) if FIX else y)  # <- culprit


torch.manual_seed(0)
m = nn.Sequential(Block(), Block())
o = torch.optim.SGD(m.parameters(), 0.1)
g = torch.Generator().manual_seed(3)
for s in range(6):
    m(torch.randn(8, 16, generator=g)).pow(2).mean().backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
