"""Each rank clips its own gradient before the average.

ranks: 2
kind: clipped_by_local_norm
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def average(m):
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


torch.manual_seed(0)
m = mlp()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(5 + rank)
for s in range(6):
    (F.cross_entropy(m(torch.randn(8, 16) * (1 + 3 * rank)), torch.randint(4, (8,)))).backward()
    if FIXED:
        average(m)
    nn.utils.clip_grad_norm_(m.parameters(), 0.05)
    if not FIXED:
        average(m)
    o.step()
    o.zero_grad()
dist.destroy_process_group()
