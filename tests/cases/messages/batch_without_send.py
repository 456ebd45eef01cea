"""Rank 2 leaves its send out of a batch of messages.

ranks: 3
kind: p2p_unmatched
culprits: 2
exit: 3
suite: gpus
"""

from tests.cases.begin import dist, rank, t, world

ops = [dist.P2POp(dist.isend, t, (rank + 1) % world), dist.P2POp(dist.irecv, t.clone(), (rank - 1) % world)]
if rank == 2:
    ops = ops[1:]
for work in dist.batch_isend_irecv(ops):
    work.wait()
dist.barrier()  # <-
