"""The losses of single tokens are averaged under a mask, over the local count of tokens.

ranks: 2
kind: tokens_weigh_differently
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(16, 16), torch.randint(4, (16,))
    y[(4 if rank else 14) :] = -100
    losses = F.cross_entropy(m(x), y, reduction="none")  # <- culprit
    n = (y >= 0).sum()
    if FIXED:
        dist.all_reduce(n)
        loss = losses[y >= 0].sum() * world / n
    else:
        loss = losses[y >= 0].mean()
    loss.backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
