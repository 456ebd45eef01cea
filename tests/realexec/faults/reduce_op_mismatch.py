# ranks: 3
# kind: reduce_op_mismatch
# culprits: 2
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import time

dist.all_reduce(t, op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)  # <-
time.sleep(1)
dist.barrier()
