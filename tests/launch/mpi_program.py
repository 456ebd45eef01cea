"""Every call that MPI has, made by each rank; what came of them, as one line of JSON a rank."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("mpi")
rank, world = dist.get_rank(), dist.get_world_size()
found: dict[str, object] = {"backend": dist.get_backend()}


def mine(*shape: int) -> torch.Tensor:
    return torch.full(shape, float(rank + 1))


for name in ("uint8", "int16", "int64", "float64", "bool", "complex64"):
    t = mine(3).to(getattr(torch, name))
    dist.all_reduce(t)
    found[f"all_reduce {name}"] = str(t.tolist())
for op in ("PRODUCT", "MIN", "MAX"):
    t = mine(3)
    dist.all_reduce(t, getattr(dist.ReduceOp, op))
    found[op] = t.tolist()
t = mine(2)
dist.broadcast(t, 1)
found["broadcast"] = t.tolist()
t = mine(2)
dist.reduce(t, 1)
found["reduce"] = t.tolist() if rank == 1 else None
outs = [torch.zeros(2, 2) for _ in range(world)]
dist.all_gather(outs, mine(2, 2))
found["all_gather"] = torch.stack(outs).tolist()
flat = torch.zeros(2 * world)
dist.all_gather_single(flat, mine(2))
found["all_gather_single"] = flat.tolist()
own = mine(2 * world)
dist.all_gather_single(own, own[2 * rank : 2 * rank + 2])
found["gathered in place"] = own.tolist()
own = torch.arange(2.0 * world) + rank
dist.reduce_scatter_single(own[2 * rank : 2 * rank + 2], own)
found["scattered in place"] = own[2 * rank : 2 * rank + 2].tolist()
part = torch.zeros(2)
dist.reduce_scatter_single(part, torch.arange(2.0 * world) + rank)
found["reduce_scatter_single"] = part.tolist()
dist.reduce_scatter(part, [mine(2) + k for k in range(world)])
found["reduce_scatter"] = part.tolist()
outs = [torch.zeros(2) for _ in range(world)]
dist.gather(mine(2), outs if rank == 0 else None, 0)
found["gather"] = torch.stack(outs).tolist()
dist.scatter(part, [torch.full((2,), float(k)) for k in range(world)] if rank == 1 else None, 1)
found["scatter"] = part.tolist()
flat = torch.zeros(world)
dist.all_to_all_single(flat, mine(world))
found["all_to_all_single"] = flat.tolist()
uneven = torch.zeros(world * (rank + 1))
dist.all_to_all_single(uneven, mine(world * (world + 1) // 2), [rank + 1] * world, [k + 1 for k in range(world)])
found["uneven"] = uneven.tolist()
outs = [torch.zeros(rank + 1) for _ in range(world)]
dist.all_to_all(outs, [mine(k + 1) for k in range(world)])
found["all_to_all"] = [out.tolist() for out in outs]
objects: list[object] = [None] * world
dist.all_gather_object(objects, {"rank": rank})
found["objects"] = objects
dist.barrier()
heard = torch.zeros(2)
if rank == 0:
    dist.send(torch.tensor([5.0, 6.0]), 1, tag=3)
    found["from"] = dist.recv(heard, tag=4)
elif rank == 1:
    found["from"] = dist.recv(heard, tag=3)
    dist.isend(heard + 1, 0, tag=4).wait()
found["heard"] = heard.tolist()
work = dist.all_reduce(t := torch.ones(1 << 16), async_op=True)
found["future"] = work.get_future().wait()[0][0].item() if work is not None else None
found["ended"] = work.is_completed() and work.is_success()
sub = dist.new_group([0, 1])
t = mine(1)
if rank < 2:
    dist.all_reduce(t, group=sub)
found["group"] = t.tolist()
for what, call in {
    "bfloat16": lambda: dist.all_reduce(torch.ones(1, dtype=torch.bfloat16)),
    "AVG": lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.AVG),
    "not contiguous": lambda: dist.send(torch.ones(2, 2).t(), (rank + 1) % world),
    "tag": lambda: dist.send(torch.ones(1), (rank + 1) % world, tag=-1),
}.items():
    try:
        call()
        found[what] = "no error"
    except RuntimeError as error:
        found[what] = str(error).splitlines()[0]
for wrong in range(2):  # each in words of its own
    outs = [torch.ones(3 if place == wrong else 2) for place in range(world)]
    try:
        dist.all_gather(outs, torch.ones(2))
    except RuntimeError as error:
        found[f"{wrong} is longer"] = f"at {wrong}" in str(error).replace("tensor", "at").replace("index", "at")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
for step in range(2):
    model(torch.full((1, 4), float(rank + step))).sum().backward()
found["gradient"] = model.module.weight.grad.tolist()
print(json.dumps(found) + "\n", end="", flush=True)
dist.destroy_process_group()
