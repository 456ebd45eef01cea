"""Expert parallel with equal initial experts (one seed) and a LayerNorm inside the expert. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()


class A2A(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        o = torch.empty_like(x)
        dist.all_to_all_single(o, x.contiguous())
        return o

    @staticmethod
    def backward(c, d):
        o = torch.empty_like(d)
        dist.all_to_all_single(o, d.contiguous())
        return o


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.inp = nn.Linear(16, 16)
        s.out = nn.Linear(16, 4)
        s.expert = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(s, x):
        h = s.inp(x)
        return s.out(h + A2A.apply(F.relu(s.expert(A2A.apply(h)))))


torch.manual_seed(0)
m = M()
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(r)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    for n, p in m.named_parameters():
        if "expert" not in n:
            dist.all_reduce(p.grad)
        p.grad /= w
    o.step()
    o.zero_grad()
dist.destroy_process_group()
