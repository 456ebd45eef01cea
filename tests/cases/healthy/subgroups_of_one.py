"""Groups of one rank, pairs and enumerated groups, made by new_subgroups.

ranks: 4
kind: healthy
"""

from tests.cases.begin import dist, rank, t

half = dist.new_group([0, 1]), dist.new_group([2, 3])
mine, _ = dist.new_subgroups(group_size=1, group=half[rank // 2])  # groups 3 and 4 are other ranks' on each side
dist.all_reduce(t, group=mine)
pair, _ = dist.new_subgroups(group_size=2)
dist.all_reduce(t, group=pair)
enumerated, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
dist.all_reduce(t, group=enumerated)
if rank < 2:  # by its members alone: nobody else needs to know
    dist.all_reduce(t, group=dist.new_group([0, 1]))
dist.barrier()
dist.destroy_process_group()
