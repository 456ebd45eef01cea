"""Futures are chained on a remote call that takes a lock that is never released.

ranks: 2
kind: host_stuck
culprits: 1
exit: 3
says: Worker worker1 (rank 1) has run never for worker0
hang_after: 1.5
gpus: no, no device map says where a tensor on a GPU goes: torch refuses to send it
"""

import os
import threading

import torch
import torch.distributed.rpc as rpc

lock = threading.Lock()
lock.acquire()


def never(x):
    with lock:  # <-
        return x


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    first = rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), 1))
    second = rpc.rpc_async("worker1", never, args=(2,)).then(lambda done: done.wait()).then(lambda done: done.wait())
    torch.futures.wait_all([first, second])
rpc.shutdown()
