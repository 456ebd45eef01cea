# ranks: 4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for name in ("dp", "tp"):
    dist.all_reduce(t, group=mesh[name].get_group())
dist.all_reduce(t, group=mesh["dp", "tp"]._flatten("both").get_group())
dist.barrier()
dist.destroy_process_group()
