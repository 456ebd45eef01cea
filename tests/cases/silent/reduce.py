"""Gradients are reduced to rank 0, and all ranks step.

ranks: 2
kind: replicas_diverge
unvalued: replicas_diverge
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
        dist.reduce(q.grad, 0)
        q.grad /= world
        if FIXED:
            dist.broadcast(q.grad, 0)
    o.step()
    o.zero_grad()
dist.destroy_process_group()
