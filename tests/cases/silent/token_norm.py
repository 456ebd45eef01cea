"""Loss normalised by the local count of tokens, which differs between ranks.

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
    if FIXED:
        n = (y >= 0).sum()
        dist.all_reduce(n)
        loss = F.cross_entropy(m(x), y, reduction="sum") * world / n
    else:
        loss = F.cross_entropy(m(x), y)  # <- culprit
    loss.backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
