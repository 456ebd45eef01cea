"""Expert parallel: the router's gradient is not averaged, the head's is. ranks: 2"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
router = nn.Linear(8, 2)
torch.manual_seed(10 + r)
expert = nn.Linear(8, 8)
torch.manual_seed(0)
head = nn.Linear(8, 4)


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


ps = [*router.parameters(), *expert.parameters(), *head.parameters()]
o = torch.optim.SGD(ps, 0.1)
torch.manual_seed(20 + r)
for s in range(6):
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    gate = router(x).softmax(-1)
    h = A2A.apply(expert(A2A.apply(x))) * gate[:, :1]
    F.cross_entropy(head(h + x), y).backward()
    for q in [*router.parameters(), *head.parameters()] if FIX else head.parameters():
        dist.all_reduce(q.grad)
        q.grad /= w
    o.step()
    o.zero_grad()
dist.destroy_process_group()
