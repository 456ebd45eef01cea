"""Tensor parallel by functions: the gradient of a column-parallel input is not reduced.

ranks: 2
kind: replicas_diverge
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world
from tests.cases.megatron import Copy, Reduce, part

torch.manual_seed(0)
pre = nn.Linear(16, 16)
a, b = torch.randn(32, 16) * 0.2, torch.randn(4, 32) * 0.2
w1, w2 = part(a, 0, world, rank), part(b, 1, world, rank)
o = torch.optim.SGD([*pre.parameters(), w1, w2], 0.1)
g = torch.Generator().manual_seed(9)
for s in range(6):
    x, y = torch.randn(8, 16, generator=g), torch.randint(4, (8,), generator=g)
    h = pre(x)
    if FIXED:
        h = Copy.apply(h, None)
    F.cross_entropy(Reduce.apply(F.relu(F.linear(h, w1)) @ w2.t(), None), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
