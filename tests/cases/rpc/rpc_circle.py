"""Two workers with one thread each call each other back and forth.

ranks: 2
kind: deadlock_cycle
culprits: 0, 1
exit: 3
suite: check
says: has no thread free to begin it (its only thread is busy)
"""

import os

import torch.distributed.rpc as rpc


def back(worker, depth):
    me = rpc.get_worker_info().name
    return depth if not depth else rpc.rpc_sync(worker, back, args=(me, depth - 1)) + 1  # <-


rank = int(os.environ["RANK"])
options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    rpc.rpc_sync("worker1", back, args=("worker0", 3))
rpc.shutdown()
