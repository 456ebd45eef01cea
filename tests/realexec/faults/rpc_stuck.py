# ranks: 2
# kind: host_stuck
# culprits: 1
# exit: 3
# hang_after: 1.5
# says: Worker worker1 (rank 1) has run never for worker0

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
