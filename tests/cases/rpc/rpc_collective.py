"""A remote call makes a collective that its caller, which waits for it, would have to make.

ranks: 2
kind: deadlock_cycle
culprits: 0, 1
exit: 3
suite: check
gpus: no, who serves the call only launches its kernel, and answers
"""

import torch.distributed.rpc as rpc

from tests.cases.begin import dist, rank, torch


def reduce():
    dist.all_reduce(torch.ones(8))  # <-


rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    rpc.rpc_async("worker1", reduce, timeout=0).then(lambda done: done.value()).wait()  # <-
rpc.shutdown()
