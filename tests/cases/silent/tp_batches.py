"""Tensor parallel by DTensor; each rank of the TP group loads its own batch.

ranks: 2
kind: replicate_is_not
suite: gpus
unvalued: replicate_is_not
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(0 if FIXED else rank)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()  # <- culprit
    o.step()
    o.zero_grad()
dist.destroy_process_group()
