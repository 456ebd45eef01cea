"""No optimizer: each rank updates its replica, and the replicas are averaged before the next step.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, nn, rank, torch, world

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
torch.manual_seed(1 + rank)
for s in range(4):
    m(torch.randn(8, 8)).pow(2).mean().backward()
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(p.grad, alpha=0.01)
            p.grad.zero_()
            dist.all_reduce(p)
            p /= world
dist.destroy_process_group()
