"""Teaches: a circle through a mesh. The ranks of one diagonal reduce over dp first, the others over tp.

Each rank waits for its neighbour in a group where the neighbour is not yet: 0 for 2, 2 for 3, 3 for 1,
1 for 0. A single rank in the other order would only wait a little.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
rank = dist.get_rank()
t = torch.ones(4)
order = ("dp", "tp") if rank in (0, 3) else ("tp", "dp")
for name in order:
    dist.all_reduce(t, group=mesh.get_group(name))  # <- culprit
