# ranks: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
splits_in = [rank + 1] * world
splits_out = [i + 1 for i in range(world)]
dist.all_to_all_single(torch.zeros(sum(splits_out)), torch.ones(sum(splits_in)), splits_out, splits_in)
objects = [None] * world
dist.all_gather_object(objects, "x" * 10 ** (rank + 1))
dist.destroy_process_group()
