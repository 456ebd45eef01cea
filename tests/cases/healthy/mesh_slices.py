"""Calls on each dimension of a mesh, and on both flattened to one.

ranks: 4
kind: healthy
"""

from torch.distributed.device_mesh import init_device_mesh

from tests.cases.begin import dist, t

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for name in ("dp", "tp"):
    dist.all_reduce(t, group=mesh[name].get_group())
dist.all_reduce(t, group=mesh["dp", "tp"]._flatten("both").get_group())
dist.barrier()
dist.destroy_process_group()
