"""A local statistic in a buffer that DDP broadcasts, with accumulation.

ranks: 2
kind: healthy
"""

import contextlib

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import F, dist, nn, rank, torch


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.net = mlp()
        s.register_buffer("scale", torch.ones(16))

    def forward(s, x):
        if s.training:
            with torch.no_grad():
                s.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return s.net(x / s.scale)


torch.manual_seed(0)
m = DDP(M())
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(1 + rank)
for s in range(6):
    for k in range(2):
        with m.no_sync() if k == 0 else contextlib.nullcontext():
            (F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))) / 2).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
