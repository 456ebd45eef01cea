"""FSDP2: rank 2 skips the backward pass of one step, as after an overflow that it alone saw.

ranks: 4
kind: missing_rank
culprits: 2
exit: 3
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, dist, nn, rank, torch

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(2, 8)).sum()  # <-
    if rank == 2 and step == 2 and not FIXED:
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
