"""GAN by hand, whose zero_grad writes zeros.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, nn, rank, torch, world


def average(m):
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


torch.manual_seed(0)
G, D = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
og, od = torch.optim.Adam(G.parameters(), 1e-2), torch.optim.Adam(D.parameters(), 1e-2)
torch.manual_seed(5 + rank)
for s in range(6):
    z, x = torch.randn(8, 8), torch.randn(8, 16)
    (D(G(z).detach()).mean() - D(x).mean()).backward()
    average(D)
    od.step()
    od.zero_grad(set_to_none=False)
    (-D(G(z)).mean()).backward()
    average(G)
    og.step()
    og.zero_grad(set_to_none=False)
    od.zero_grad(set_to_none=False)
dist.destroy_process_group()
