"""The results of functional collectives are read on one rank only, where reading waits; DTensor's never.

ranks: 2
kind: healthy
"""

import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.cases.begin import dist, rank, torch

mesh = init_device_mesh("cpu", (2,))
for _ in range(5):
    total = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    DTensor.from_local(torch.ones(4), mesh, [Partial()]).redistribute(mesh, [Replicate()])
    if rank == 0:
        assert total.sum().item() == 8
dist.barrier()
dist.destroy_process_group()
