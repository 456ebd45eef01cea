"""A running scale is updated with each rank's own batch; DDP does not broadcast buffers.

ranks: 2
kind: buffers_differ
suite: gpus
unvalued: buffers_differ
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world


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
                a = x.abs().mean(0)
                if FIXED:
                    dist.all_reduce(a)
                    a /= world
                s.scale.mul_(0.9).add_(a, alpha=0.1)
        return s.net(x / s.scale)


torch.manual_seed(0)
m = DDP(M(), broadcast_buffers=False)
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(1 + rank)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
