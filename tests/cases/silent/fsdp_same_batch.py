"""fully_shard with one seed for the data of all ranks.

ranks: 2
kind: same_batch
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


torch.manual_seed(0)
m = mlp()
fully_shard(m, mesh=init_device_mesh("cpu", (world,)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(1 + rank * FIXED)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
