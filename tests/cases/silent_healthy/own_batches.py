"""A batch sampler that mixes the indices of a DistributedSampler by an epoch of its own, and one that is its own.

ranks: 2
kind: healthy
"""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from tests.cases.begin import dist, nn, rank, torch, world


class Mixed(BatchSampler):
    """Another order in each epoch, though the sampler's is one."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        own = torch.Generator().manual_seed(self.epoch)
        indices = list(self.sampler)
        order = torch.randperm(len(indices), generator=own)
        yield from order.view(-1, self.batch_size).apply_(lambda place: indices[place]).tolist()


class Own(Mixed):
    """Has itself as sampler."""

    @property
    def sampler(self):
        return self

    @sampler.setter
    def sampler(self, given):
        self.shares = given

    def __iter__(self):
        yield from torch.tensor(list(self.shares)).view(-1, self.batch_size).tolist()


torch.manual_seed(0)
ds = TensorDataset(torch.randn(64, 16))
m = DDP(nn.Linear(16, 4))
o = torch.optim.SGD(m.parameters(), 0.1)
for kind in (Mixed, Own):
    shares = DistributedSampler(ds, num_replicas=world, rank=rank)
    for _epoch in range(3):
        for (x,) in DataLoader(ds, batch_sampler=kind(shares, 8, drop_last=True)):
            m(x).pow(2).mean().backward()
            o.step()
            o.zero_grad()
dist.destroy_process_group()
