"""The ranks of a ring are passed in another order than torch keeps, and the parts are indexed by hand.

ranks: 4
kind: group_ranks_sorted
unvalued: group_ranks_sorted
"""

from tests.cases.begin import FIXED, dist, rank, torch, world

order = list(reversed(range(world)))
ring = dist.new_group(order, sort_ranks=not FIXED)  # <- culprit
parts = [torch.empty(4) for _ in order]
dist.all_gather(parts, torch.full((4,), float(rank)), group=ring)
first_stage = parts[0]
dist.destroy_process_group()
