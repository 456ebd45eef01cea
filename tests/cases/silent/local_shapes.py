"""Each rank makes a DTensor of its own rows, which are not the rows that Shard(0) means.

ranks: 4
kind: parts_unlike_chunks
gpus: no, the mesh is of CPUs
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.cases.begin import FIXED, dist, rank, torch, world

mesh = init_device_mesh("cpu", (world,))
rows = 3 if FIXED else (4, 2, 3, 3)[rank]
tensor = DTensor.from_local(torch.ones(rows, 8), mesh, [Shard(0)])  # <- culprit
dist.destroy_process_group()
