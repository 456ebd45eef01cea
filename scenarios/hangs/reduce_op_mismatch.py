"""Teaches: the ranks disagree about the reduce operation.

Nothing hangs on gloo: the result is silently wrong.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(4), op=op)  # <- culprit
