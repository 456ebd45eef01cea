"""HSDP: one rank leaves out a backward pass. The other shard group tells which of its two ranks is odd.

ranks: 4
kind: missing_rank
culprits: 2
exit: 3
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, dist, rank, torch

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for step in range(4):
    loss = model(torch.ones(2, 8)).sum()  # <-
    if rank == 2 and step == 2 and not FIXED:
        continue
    loss.backward()
dist.barrier()
dist.destroy_process_group()
