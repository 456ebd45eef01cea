"""Every kind of collective, message, group and wrapper once.

ranks: 2
kind: healthy
"""

import warnings

import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.cases.begin import dist, nn, rank, torch, world

warnings.simplefilter("ignore")
torch.set_num_threads(1)
everyone = list(range(world))

# Collectives, each kind once.
t = torch.ones(4)
dist.all_reduce(t)
assert t[0] == world
dist.broadcast(t, 0)
dist.reduce(t, 0)
parts = [torch.zeros(4) for _ in everyone]
dist.all_gather(parts, t)
whole = torch.zeros(4 * world)
dist.all_gather_into_tensor(whole, t)
dist.gather(t, parts if rank == 0 else None, dst=0)
dist.scatter(t, parts if rank == 0 else None, src=0)
dist.reduce_scatter(t, parts)
dist.reduce_scatter_tensor(t, whole)
dist.all_to_all_single(torch.zeros(world), torch.arange(float(world)))
dist.all_to_all([torch.zeros(1) for _ in everyone], [torch.ones(1) for _ in everyone])
dist.barrier()
dist.monitored_barrier()

# Objects.
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert objects[-1]["rank"] == world - 1
one = [rank]
dist.broadcast_object_list(one, 0)
assert one == [0]
mine = [None]
dist.scatter_object_list(mine, everyone if rank == 0 else None, 0)
assert mine == [rank]
dist.gather_object(rank, objects if rank == 0 else None, 0)

# Point to point.
after, before = (rank + 1) % world, (rank - 1) % world
operations = [
    dist.P2POp(dist.isend, torch.ones(2), after),
    dist.P2POp(dist.irecv, torch.ones(2), before),
]
for request in dist.batch_isend_irecv(operations):
    request.wait()
if rank == 0:
    dist.send(torch.ones(3), 1, tag=5)
if rank == 1:
    buffer = torch.zeros(3)
    assert dist.recv(buffer, tag=5) == 0
    assert buffer[0] == 1

# Handles, futures, coalescing.
work = dist.all_reduce(t, async_op=True)
work.wait()
assert work.is_completed()
dist.all_reduce(t, async_op=True).get_future().wait()
with dist.distributed_c10d._coalescing_manager():
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3))

# Groups and functional collectives.
pair, same = dist.new_group([0, 1]), dist.new_group(everyone)
dist.all_reduce(torch.ones(1), group=same)
if rank < 2:
    dist.all_reduce(torch.ones(1), group=pair)
assert (funcol.all_reduce(torch.ones(3), "sum", everyone) + 1)[0] == world + 1
assert funcol.all_gather_tensor(torch.ones(3), 0, dist.group.WORLD).sum() == 3 * world
assert funcol.reduce_scatter_tensor(torch.ones(world), "sum", 0, dist.group.WORLD).sum() == world


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


# DDP, FSDP2, tensor parallel.
train(DistributedDataParallel(net()))
mesh = init_device_mesh("cpu", (world,))
sharded = net()
for layer in sharded:
    fully_shard(layer, mesh=mesh)
train(fully_shard(sharded, mesh=mesh))
matrix = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
other = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
(matrix @ other).redistribute(mesh, [Replicate()]).to_local()
plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
parallelize_module(net(), mesh, plan)(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
