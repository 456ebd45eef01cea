# ranks: 2
# kind: missing_rank
# culprits: 1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group()
work = dist.all_reduce(torch.ones(8), async_op=True) if rank == 0 else None
dist.all_reduce(torch.ones(8), group=group)  # <-
if work is not None:
    work.wait()
