# ranks: 3
# kind: missing_rank
# culprits: 1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
works = [] if rank == 1 else [dist.all_reduce(torch.ones(8), async_op=True)]
works += [dist.isend(torch.ones(16), (rank + 1) % world), dist.irecv(torch.zeros(16), (rank - 1) % world)]  # <-
for work in works:
    work.wait()
