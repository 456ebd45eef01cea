"""Rank 1's splits disagree in the part that it keeps itself.

ranks: 3
kind: splits_mismatch
culprits: 1
exit: 4
"""

from tests.cases.begin import dist, rank, torch, world

for step in range(4):
    sends = [1, 3, 2] if (rank, step) == (1, 2) else [2] * world  # gloo fails on this rank only, in its own part
    out = torch.empty(2 * world)
    dist.all_to_all_single(out, torch.ones(2 * world), [2] * world, sends)  # <-
