"""DTensors of parts as torch.chunk gives them, with the shape of the whole where they are uneven, and of replicas.

ranks: 4
kind: healthy
gpus: no, the mesh is of CPUs
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.cases.begin import dist, rank, torch, world

mesh, grid = DeviceMesh("cpu", mesh=list(range(world))), init_device_mesh("cpu", (2, world // 2))
torch.manual_seed(0)
whole = torch.randn(10, 8)
part = whole.chunk(world)[rank]
DTensor.from_local(part, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
DTensor.from_local(whole, mesh)
DTensor.from_local(whole[:4].chunk(2)[rank % 2], grid, [Replicate(), Shard(0)])
DTensor.from_local(whole.chunk(2, 1)[rank // 2], grid, [Shard(-1), Replicate()])
distribute_tensor(whole, mesh, [Shard(0)])
dist.destroy_process_group()
