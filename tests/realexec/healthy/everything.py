# ranks: 2

import torch
import torch.distributed as dist
import warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
t = torch.ones(4)
dist.all_reduce(t); assert t[0]==w
dist.broadcast(t, 0)
dist.reduce(t, 0)
o=[torch.zeros(4) for _ in range(w)]; dist.all_gather(o, t)
out=torch.zeros(4*w); dist.all_gather_into_tensor(out, t)
dist.gather(t, o if r==0 else None, dst=0)
dist.scatter(t, o if r==0 else None, src=0)
dist.reduce_scatter(t, o)
dist.reduce_scatter_tensor(t, out)
dist.all_to_all_single(torch.zeros(w), torch.arange(float(w)))
try:
    dist.all_to_all([torch.zeros(1) for _ in range(w)], [torch.ones(1) for _ in range(w)])
except RuntimeError as e: print("a2a", str(e)[:80]) if r==0 else None
dist.barrier(); dist.monitored_barrier()
objs=[None]*w; dist.all_gather_object(objs, {"r":r}); assert objs[w-1]["r"]==w-1
ob=[r]; dist.broadcast_object_list(ob, 0); assert ob==[0]
l=[None]; dist.scatter_object_list(l, list(range(w)) if r==0 else None, 0); assert l==[r]
dist.gather_object(r, objs if r==0 else None, 0)
nx,pv=(r+1)%w,(r-1)%w
reqs=dist.batch_isend_irecv([dist.P2POp(dist.isend,torch.ones(2),nx),dist.P2POp(dist.irecv,torch.ones(2),pv)])
for q in reqs: q.wait()
if r==0: dist.send(torch.ones(3),1,tag=5)
if r==1:
    b=torch.zeros(3); s=dist.recv(b,tag=5); assert s==0 and b[0]==1
h=dist.all_reduce(t,async_op=True); h.wait(); assert h.is_completed()
f=dist.all_reduce(t,async_op=True).get_future(); f.wait()
with dist._coalescing_manager() if hasattr(dist,'_coalescing_manager') else dist.distributed_c10d._coalescing_manager():
    dist.all_reduce(torch.ones(2)); dist.all_reduce(torch.ones(3))
gs=[dist.new_group([0,1]), dist.new_group(list(range(w)))]
dist.all_reduce(torch.ones(1), group=gs[1])
if r<2: dist.all_reduce(torch.ones(1), group=gs[0])
import torch.distributed._functional_collectives as fc
x=fc.all_reduce(torch.ones(3),"sum",list(range(w))); x=x+1; assert x[0]==w+1
x=fc.all_gather_tensor(torch.ones(3),0,dist.group.WORLD); assert x.sum()==3*w
x=fc.reduce_scatter_tensor(torch.ones(w),"sum",0,dist.group.WORLD); assert x.sum()==w
from torch.nn.parallel import DistributedDataParallel as DDP
m=DDP(torch.nn.Sequential(torch.nn.Linear(8,8),torch.nn.Linear(8,8)))
opt=torch.optim.SGD(m.parameters(),lr=.1)
for i in range(3):
    opt.zero_grad(); m(torch.randn(4,8)).sum().backward(); opt.step()
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh=init_device_mesh("cpu",(w,))
m=torch.nn.Sequential(torch.nn.Linear(8,8),torch.nn.Linear(8,8))
for l in m: fully_shard(l,mesh=mesh)
fully_shard(m,mesh=mesh)
opt=torch.optim.SGD(m.parameters(),lr=.1)
for i in range(2):
    opt.zero_grad(); m(torch.randn(4,8)).sum().backward(); opt.step()
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
d=distribute_tensor(torch.randn(8,8),mesh,[Shard(0)])
e=(d@distribute_tensor(torch.randn(8,8),mesh,[Replicate()])).redistribute(mesh,[Replicate()]).to_local()
from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel
m=torch.nn.Sequential(torch.nn.Linear(8,8),torch.nn.Linear(8,8))
m=parallelize_module(m,mesh,{"0":ColwiseParallel(),"1":RowwiseParallel()})
m(torch.randn(4,8)).sum().backward()
dist.destroy_process_group()
