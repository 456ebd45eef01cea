"""No optimizer: the program updates its parameters, and LayerNorm's gradients are not reduced.

ranks: 2
kind: replicas_diverge
"""

from tests.cases.begin import FIXED, dist, nn, rank, torch, world
from tests.cases.megatron import Gather


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.norm = nn.LayerNorm(8)
        torch.manual_seed(10 + rank)
        s.column = nn.Linear(8, 4, bias=False)

    def forward(s, x):
        return s.column(Gather.apply(s.norm(x.chunk(world)[rank]), None))


m = M()
torch.manual_seed(3)
for s in range(4):
    m(torch.randn(8, 8)).pow(2).sum().backward()
    if FIXED:
        for p in m.norm.parameters():
            dist.all_reduce(p.grad)
    with torch.no_grad():
        for p in m.parameters():
            p -= 0.01 * p.grad
            p.grad = None
dist.destroy_process_group()
