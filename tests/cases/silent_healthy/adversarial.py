"""Each rank clips the gradient of its own inputs.

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


torch.manual_seed(0)
m = DDP(mlp())
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(5 + rank)
for s in range(6):
    x, y = torch.randn(8, 16, requires_grad=True), torch.randint(4, (8,))
    (g,) = torch.autograd.grad(F.cross_entropy(m.module(x), y), x)
    x.grad = g
    nn.utils.clip_grad_norm_([x], 0.01)
    F.cross_entropy(m((x + x.grad.sign() * 0.1).detach()), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
