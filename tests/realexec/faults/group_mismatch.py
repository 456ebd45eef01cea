# ranks: 4
# kind: deadlock_cycle
# culprits: 0,1
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
pair = dist.new_group([0, 1])
most = dist.new_group([0, 1, 2])
dist.all_reduce(t, group=pair if rank == 0 else most) if rank in (0, 1) else None
dist.barrier()
