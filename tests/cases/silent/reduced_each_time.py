"""The accumulated gradient is all-reduced after each micro-batch.

ranks: 2
kind: mixed_scale
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


torch.manual_seed(0)
m = mlp()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(5 + rank)
for s in range(6):
    for k in range(3):
        (F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))) / 3).backward()
        if not FIXED or k == 2:
            for q in m.parameters():
                dist.all_reduce(q.grad)
    for q in m.parameters():
        q.grad /= world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
