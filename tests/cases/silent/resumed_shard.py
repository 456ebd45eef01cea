"""Rank 2 resumes the shard of its checkpoint, and the others have divided the data anew.

ranks: 4
kind: samples_overlap
gpus: no, it draws from a generator of the CPU
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
X, Y = torch.randn(512, 16), torch.randint(4, (512,))
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.SGD(m.parameters(), 0.1)
order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
old = torch.randperm(512, generator=torch.Generator().manual_seed(0))
shard = (old if rank == 2 and not FIXED else order)[rank::world]
for ids in shard.split(8):
    F.cross_entropy(m(X[ids]), Y[ids]).backward()  # <- culprit
    o.step()
    o.zero_grad()
dist.destroy_process_group()
