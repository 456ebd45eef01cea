"""The future that an async_execution function returned is never set.

ranks: 2
kind: host_stuck
culprits: 1
exit: 3
says: worker1 (rank 1) has run later for worker0
hang_after: 1.5
"""

import os

import torch.distributed.rpc as rpc
from torch.futures import Future

kept = []


@rpc.functions.async_execution  # <-
def later():
    kept.append(Future())
    return kept[-1]


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    rpc.rpc_sync("worker1", later)
rpc.shutdown()
