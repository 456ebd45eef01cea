# ranks: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
if rank < 2:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(t, group=group)
else:
    group = dist.new_group([2, 3], use_local_synchronization=True)
    dist.all_reduce(t, group=group)
    again = dist.new_group([2, 3], use_local_synchronization=True)
dist.barrier()
dist.destroy_process_group()
