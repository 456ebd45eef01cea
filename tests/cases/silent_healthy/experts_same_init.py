"""Expert parallel with equal initial experts (one seed) and a LayerNorm inside the expert.

ranks: 2
kind: healthy
"""

from tests.cases.begin import F, dist, nn, rank, torch, world
from tests.cases.megatron import AllToAll


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.inp = nn.Linear(16, 16)
        s.out = nn.Linear(16, 4)
        s.expert = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(s, x):
        h = s.inp(x)
        return s.out(h + AllToAll.apply(F.relu(s.expert(AllToAll.apply(h)))))


torch.manual_seed(0)
m = M()
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    for n, p in m.named_parameters():
        if "expert" not in n:
            dist.all_reduce(p.grad)
        p.grad /= world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
