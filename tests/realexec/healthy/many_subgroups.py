# ranks: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
groups = [dist.new_group([i, j]) for i in range(world) for j in range(i + 1, world)]
for _ in range(3):
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.all_reduce(t, group=group)
dist.barrier()
dist.destroy_process_group()
