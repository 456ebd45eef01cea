"""src is a global rank: in the second group one member passes its leader's global rank, the others 0-based ones.

ranks: 4
kind: root_mismatch
culprits: 3
exit: 4
"""

from tests.cases.begin import FIXED, dist, rank, torch

low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
group = low if rank < 2 else high
for _ in range(2):
    dist.all_reduce(torch.ones(2), group=group)
src = 0 if rank < 2 else 2 if rank == 3 or FIXED else 3
dist.broadcast(torch.ones(4), src=src, group=group)  # <-
dist.barrier()
dist.destroy_process_group()
