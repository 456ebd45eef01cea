"""Unlike splits and objects of unlike sizes.

ranks: 3
kind: healthy
"""

from tests.cases.begin import dist, rank, torch, world

splits_in = [rank + 1] * world
splits_out = [i + 1 for i in range(world)]
dist.all_to_all_single(torch.zeros(sum(splits_out)), torch.ones(sum(splits_in)), splits_out, splits_in)
objects = [None] * world
dist.all_gather_object(objects, "x" * 10 ** (rank + 1))
dist.destroy_process_group()
