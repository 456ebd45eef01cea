# ranks: 3
# kind: async_never_waited
# culprits: 0,1,2
# exit: 0

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
h = dist.all_reduce(torch.ones(8), async_op=True)  # <-
