"""GAN under DDP: two optimizers, generator and discriminator steps alternate.

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import dist, nn, rank, torch

torch.manual_seed(0)
G = DDP(nn.Linear(8, 16))
D = DDP(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
og, od = torch.optim.Adam(G.parameters(), 1e-2), torch.optim.Adam(D.parameters(), 1e-2)
torch.manual_seed(rank)
for s in range(6):
    z, x = torch.randn(8, 8), torch.randn(8, 16)
    (D(G(z).detach()).mean() - D.module(x).mean()).backward()
    od.step()
    od.zero_grad()
    og.zero_grad()
    (-D.module(G(z)).mean()).backward()
    og.step()
    og.zero_grad()
    od.zero_grad()
dist.destroy_process_group()
