# ranks: 4
# kind: missing_rank
# culprits: 3
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for step in range(4):
    if not (rank == 3 and step == 2):
        dist.all_reduce(t, group=mesh.get_group("tp"))
    dist.all_reduce(t, group=mesh.get_group("dp"))
dist.barrier()  # <-
