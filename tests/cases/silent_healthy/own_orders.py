"""Each rank draws from the whole data in an order of its own, and evaluates its part of a sampler that repeats some.

ranks: 4
kind: healthy
gpus: no, it draws from a generator of the CPU
"""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.cases.begin import F, dist, nn, rank, torch

torch.manual_seed(0)
ds = TensorDataset(torch.randn(101, 16), torch.randint(4, (101,)))
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
generator = torch.Generator().manual_seed(rank)
for e in range(2):
    for x, y in DataLoader(ds, 4, shuffle=True, generator=generator, drop_last=True):
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
    for x, y in DataLoader(ds, 4, sampler=DistributedSampler(ds, shuffle=False)):
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
dist.destroy_process_group()
