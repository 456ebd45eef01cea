"""Pipeline stages of equal shape, initialized from one seed.

ranks: 2
kind: healthy
"""

from tests.cases.begin import F, dist, nn, rank, torch

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16))
o = torch.optim.AdamW(m.parameters(), 1e-2)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    if rank == 0:
        h = m(x)
        dist.send(h.detach(), 1)
        d = torch.empty_like(h)
        dist.recv(d, 1)
        h.backward(d)
    else:
        h = torch.empty(8, 16)
        dist.recv(h, 0)
        h.requires_grad_()
        F.mse_loss(m(h), y).backward()
        dist.send(h.grad, 0)
    o.step()
    o.zero_grad()
dist.destroy_process_group()
