"""No DistributedSampler: both ranks train on the same batches.

ranks: 2
kind: same_batch
gpus: no, it draws from a generator of the CPU
"""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.cases.begin import FIXED, F, dist, nn, torch

torch.manual_seed(0)
X, Y = torch.randn(64, 16), torch.randint(4, (64,))
ds = TensorDataset(X, Y)

m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
dl = DataLoader(ds, 8, sampler=DistributedSampler(ds)) if FIXED else DataLoader(ds, 8, shuffle=True)  # <- culprit
for e in range(2):
    for x, y in dl:
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
dist.destroy_process_group()
