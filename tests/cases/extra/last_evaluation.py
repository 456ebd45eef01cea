"""Rank 0 alone runs the sharded model once more after the last step, when the others have ended.

ranks: 4
kind: extra_collective
culprits: 0
exit: 4
says: it stands under `if rank == 0 or
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, dist, nn, rank, torch

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
net(torch.randn(2, 16)).sum().backward()
if rank == 0 or FIXED:
    with torch.no_grad():
        net(torch.ones(2, 16))  # <-
