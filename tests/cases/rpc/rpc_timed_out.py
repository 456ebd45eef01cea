"""A remote call takes longer than its timeout.

ranks: 2
kind: rank_raised
culprits: 0
exit: 1
says: The call's own timeout ended it: it gave up on rpc_sync of slow to worker1 (rank 1) after
"""

import os
import time

import torch.distributed.rpc as rpc


def slow():
    time.sleep(4)


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    rpc.rpc_sync("worker1", slow, timeout=0.5)  # <-
rpc.shutdown()
