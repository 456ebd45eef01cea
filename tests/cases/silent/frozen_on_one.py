"""A layer is frozen on rank 1 only.

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
if rank == 1 and not FIXED:
    for q in m[0].parameters():
        q.requires_grad_(False)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    for q in m.parameters():
        if q.grad is None:
            q.grad = torch.zeros_like(q)
        t = q.grad.clone()
        dist.all_reduce(t)
        t /= world
        if q.requires_grad:
            q.grad.copy_(t)
        else:
            q.grad = None
    o.step()
    o.zero_grad()
dist.destroy_process_group()
