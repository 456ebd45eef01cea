"""Local SGD: parameters are averaged every fourth step.

ranks: 2
kind: healthy
"""

from tests.cases.begin import F, dist, nn, rank, torch, world

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(12):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
    if s % 4 == 3:
        for p in m.parameters():
            dist.all_reduce(p.data)
            p.data /= world
dist.destroy_process_group()
