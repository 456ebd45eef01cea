"""Experts begin as copies of one dense layer, beside an embedding split by vocabulary. ranks: 2"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
router, head, expert = nn.Linear(8, 2), nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
emb = nn.Parameter(torch.randn(20, 8).chunk(w)[r].clone())


class A2A(torch.autograd.Function):
    @staticmethod
    def forward(c, x):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(c, d):
        y = torch.empty_like(d)
        dist.all_to_all_single(y, d.contiguous())
        return y


ps = [*router.parameters(), *expert.parameters(), *head.parameters(), emb]
o = torch.optim.SGD(ps, 0.1)
torch.manual_seed(20 + r)
for s in range(6):
    x, y = emb[torch.randint(10, (8,))], torch.randint(4, (8,))
    h = A2A.apply(expert(A2A.apply(x))) * router(x).softmax(-1)[:, :1]
    F.cross_entropy(head(h + x), y).backward()
    for q in (*router.parameters(), *head.parameters()):
        dist.all_reduce(q.grad)
        q.grad /= w
    o.step()
    o.zero_grad()
dist.destroy_process_group()
