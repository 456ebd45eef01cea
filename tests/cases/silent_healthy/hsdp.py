"""HSDP: shards over 2, replicas over 2; reductions have another order of additions.

ranks: 4
kind: healthy
suite: gpus
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import F, dist, nn, rank, torch

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
for l in (m[0], m[2]):
    fully_shard(l, mesh=mesh)
fully_shard(m, mesh=mesh)
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    o.step()
    o.zero_grad()
dist.destroy_process_group()
