"""A remote call takes a lock that is never released.

ranks: 2
kind: host_stuck
culprits: 1
exit: 3
says: Worker worker1 (rank 1) has run never for worker0
hang_after: 1.5
"""

import os
import threading

import torch.distributed.rpc as rpc

lock = threading.Lock()
lock.acquire()


def never():
    with lock:  # <-
        return 1


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    rpc.remote("worker1", never).to_here()
rpc.shutdown()
