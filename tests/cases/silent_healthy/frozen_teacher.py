"""A frozen teacher inside of a DDP model follows the student, which all ranks have; a frozen part is each rank's own.

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel as DDP

import distsim
from tests.cases.begin import dist, nn, rank, torch


class Distilled(nn.Module):
    """A student beside an average of itself, and a bias that is meant for one rank."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 4), nn.Linear(16, 4).requires_grad_(False)
        self.own = distsim.varies(nn.Parameter(torch.zeros(4), requires_grad=False))

    def forward(self, x):
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(now, 0.1)
            self.own.add_(x.mean())
        return (self.student(x) - self.teacher(x) + self.own).pow(2).mean()


torch.manual_seed(0)
m = DDP(Distilled())
o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
torch.manual_seed(1 + rank)
for _step in range(6):
    m(torch.randn(8, 16)).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
