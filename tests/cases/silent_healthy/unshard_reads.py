"""fully_shard gathers for a look and for an evaluation, and nobody writes.

ranks: 2
kind: healthy
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import F, dist, nn, rank, torch, world


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


torch.manual_seed(0)
m = mlp()
fully_shard(m, mesh=init_device_mesh("cpu", (world,)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(1 + rank)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
    m.unshard()
    n = m[0].weight.norm().item()
    m.reshard()
    m.eval()
    with torch.no_grad():
        m(torch.ones(4, 16))
    m.train()
dist.destroy_process_group()
