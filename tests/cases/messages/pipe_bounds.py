"""The last stage of a pipeline counts one micro-batch more than the others send.

ranks: 3
kind: p2p_unmatched
culprits: 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch, world

rounds = 4 if rank == 2 and not FIXED else 3
for _ in range(rounds):
    x = torch.ones(4)
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank < world - 1:
        dist.send(x, rank + 1)
dist.all_reduce(torch.ones(1))  # <-
dist.destroy_process_group()
