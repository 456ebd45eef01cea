# ranks: 3
# kind: missing_rank
# culprits: 1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank != 1:
    future = dist.all_reduce(torch.ones(8), async_op=True).get_future()
    mean = future.then(lambda done: done.value()[0] / 3)
    torch.futures.wait_all([mean, future])
dist.barrier()  # <-
