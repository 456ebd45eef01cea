"""Multi-query attention: the key and value head is on every rank, and its gradient is a part. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        return x.view_as(x)

    @staticmethod
    def backward(c, d):
        d = d.contiguous().clone()
        dist.all_reduce(d)
        return d


class G(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(c, d):
        return d


def part(t, dim=0):
    return nn.Parameter(t.chunk(w, dim)[r].clone())


gen = torch.Generator().manual_seed(3)
torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.q = part(torch.randn(32, 16) * 0.2)
        s.kv = nn.Parameter(torch.randn(16, 16) * 0.2)
        s.o = part(torch.randn(16, 32) * 0.2, 1)

    def forward(s, x):
        x1 = Fn.apply(x)
        q = (x1 @ s.q.t()).view(8, -1, 8).transpose(0, 1)
        kv = x1 @ (Fn.apply(s.kv) if FIX else s.kv).t()
        k, v = kv[:, :8], kv[:, 8:]
        a = (q @ k.t() / 3).softmax(-1) @ v
        return x + G.apply(a.transpose(0, 1).reshape(8, -1) @ s.o.t())


m = M()
o = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(4):
    m(torch.randn(8, 16, generator=gen)).pow(2).mean().backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
