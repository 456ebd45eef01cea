"""The middle stage of a pipeline runs one micro-batch less than its neighbours, and waits in the barrier.

ranks: 3
kind: p2p_unmatched
culprits: 1
exit: 3
says: Give `range(micro)`
"""

from tests.cases.begin import FIXED, dist, rank, torch, world


def stage(micro):
    for _ in range(micro):
        x = torch.zeros(4)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        if rank < world - 1:
            dist.send(x, dst=rank + 1)


stage(4 if rank != 1 or FIXED else 3)
dist.barrier()  # <-
dist.destroy_process_group()
