"""The data is divided by the world of an earlier run, so that nobody reads half of it.

ranks: 2
kind: samples_unseen
gpus: no, it draws from a generator of the CPU
"""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
ds = TensorDataset(torch.randn(128, 16), torch.randint(4, (128,)))
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
sampler = DistributedSampler(ds, num_replicas=world if FIXED else 4, rank=rank)  # <- culprit
for e in range(2):
    sampler.set_epoch(e)
    for x, y in DataLoader(ds, 8, sampler=sampler):
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
dist.destroy_process_group()
