"""Sequence parallel: dropout of the shards uses one seed on all ranks. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


class AG(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        ys = [torch.empty_like(x) for _ in range(w)]
        dist.all_gather(ys, x.contiguous())
        return torch.cat(ys)

    @staticmethod
    def backward(c, d):
        d = d.contiguous().clone()
        dist.all_reduce(d)
        return d.chunk(w)[r].contiguous()


class RS(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(w)[r].contiguous()

    @staticmethod
    def backward(c, d):
        ys = [torch.empty_like(d) for _ in range(w)]
        dist.all_gather(ys, d.contiguous())
        return torch.cat(ys)


def part(t, dim=0):
    return nn.Parameter(t.chunk(w, dim)[r].clone())


gen = torch.Generator().manual_seed(3)
torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.w1 = part(torch.randn(32, 16) * 0.2)
        s.w2 = part(torch.randn(16, 32) * 0.2, 1)

    def forward(s, x):
        return x + F.dropout(RS.apply(F.gelu(AG.apply(x) @ s.w1.t()) @ s.w2.t()), 0.3)


m = M()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(11 + r * FIX)
for _ in range(4):
    (m(torch.randn(8, 16, generator=gen).chunk(w)[r]).pow(2).sum() / 128).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
