"""A plain tensor that differs by rank becomes a DTensor, which takes it for a replica.

ranks: 2
kind: replicate_is_not
gpus: no, the mesh is of CPUs
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.cases.begin import FIXED, dist, rank, torch, world

mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0 if FIXED else rank)
x = DTensor.from_local(torch.randn(8, 16), mesh)  # <- culprit
dist.destroy_process_group()
