"""A frozen parameter of a DDP model is a running average of each rank's own inputs.

ranks: 2
kind: buffers_differ
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world


class Centered(nn.Module):
    """Subtracts the average of the inputs so far."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        with torch.no_grad():
            here = x.mean(0)
            if FIXED:
                dist.all_reduce(here)
                here /= world
            self.average.lerp_(here, 0.2)
        return self.out(x - self.average)


torch.manual_seed(0)
m = DDP(Centered())
o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
torch.manual_seed(1 + rank)
for _step in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
