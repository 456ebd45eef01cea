"""A sampler that batches samples of a DistributedSampler: its epoch is never set.

ranks: 2
kind: epochs_alike
gpus: no, it draws from a generator of the CPU
"""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
ds = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
m = DDP(nn.Linear(16, 4))
o = torch.optim.SGD(m.parameters(), 0.1)
shares = DistributedSampler(ds, num_replicas=world, rank=rank)
loader = DataLoader(ds, batch_sampler=BatchSampler(shares, 8, drop_last=True))
for epoch in range(4):
    if FIXED:
        shares.set_epoch(epoch)
    for x, y in loader:
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
dist.destroy_process_group()
