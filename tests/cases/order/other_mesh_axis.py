"""One rank reduces over the tensor-parallel group where the others use the data-parallel one, in one step.

ranks: 4
kind: group_mismatch
culprits: 2
exit: 4
says: Pass the same group= on every rank
"""

from torch.distributed.device_mesh import init_device_mesh

from tests.cases.begin import FIXED, dist, rank, torch

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
data, tensor = mesh.get_group("dp"), mesh.get_group("tp")
for step in range(3):
    x = torch.ones(8)
    dist.all_reduce(x, group=tensor)
    group = tensor if rank == 2 and step == 1 and not FIXED else data
    dist.all_reduce(x, group=group)  # <-
dist.barrier()
dist.destroy_process_group()
