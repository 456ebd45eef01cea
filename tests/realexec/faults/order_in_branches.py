# ranks: 3
# kind: wrong_order
# culprits: 1
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
a, b = torch.ones(8), torch.zeros(8)
for step in range(4):
    if (rank, step) == (1, 2):
        dist.all_reduce(b)  # <-
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)
