# ranks: 2
# kind: deadlock_cycle
# culprits: 0,1
# exit: 3

import os

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc


def reduce():
    dist.all_reduce(torch.ones(8))  # <-


rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    rpc.rpc_async("worker1", reduce, timeout=0).then(lambda done: done.value()).wait()  # <-
rpc.shutdown()
