"""Two models that are not data parallel, each under fully_shard over one rank, read equal batches.

ranks: 2
kind: healthy
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import dist, nn, torch

mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
torch.manual_seed(dist.get_rank())
m = nn.Linear(16, 4)
fully_shard(m, mesh=mesh["dp"])
o = torch.optim.SGD(m.parameters(), 0.1 * (1 + dist.get_rank()))
torch.manual_seed(7)
for s in range(6):
    m(torch.randn(8, 16)).pow(2).mean().backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
