"""Teaches: a mesh of two dimensions.

FSDP over the rows, tensor parallel over the columns, each with its own groups.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
tp = 2
mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
dp_ranks = dist.get_process_group_ranks(mesh.get_group("dp"))
tp_ranks = dist.get_process_group_ranks(mesh.get_group("tp"))
print(f"rank {rank}: coordinate {tuple(mesh.get_coordinate())}, dp {dp_ranks}, tp {tp_ranks}")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    # Ranks of one row of tp see the same data.
    seed = 10 * step + mesh.get_local_rank("dp")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}, step {step}: loss {loss.item():.5f}")
dist.destroy_process_group()
