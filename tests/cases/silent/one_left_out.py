"""Gathered gradients are added up without the last rank's.

ranks: 3
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
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    for q in m.parameters():
        gs = [torch.empty_like(q.grad) for _ in range(world)]
        dist.all_gather(gs, q.grad)
        q.grad = sum(gs if FIXED else gs[:-1]) / world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
