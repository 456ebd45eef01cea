# ranks: 4
# kind: group_mismatch
# culprits: 3
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
for step in range(3):
    dim = "replicate" if rank == 3 and step == 2 else "shard"
    dist.all_reduce(t, group=mesh.get_group(dim))  # <-
dist.barrier()
