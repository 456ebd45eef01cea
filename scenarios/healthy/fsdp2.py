"""Teaches: FSDP2. fully_shard cuts every parameter over the ranks.

All-gathers before, reduce-scatters after do the rest.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))

torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(*layers)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

mine = sum(p.to_local().numel() for p in model.parameters())
print(f"rank {rank}: {mine} of {sum(p.numel() for p in model.parameters())} parameters")
for step in range(3):
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = (model(x) - x.roll(1, dims=1)).pow(2).mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}, step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
dist.destroy_process_group()
