"""Rank 0 waits for one message's handle twice, which gloo never ends.

ranks: 2
kind: host_stuck
culprits: 0
exit: 3
suite: check
says: Call wait() once on each handle of isend or irecv
hang_after: 3
gpus: no, NCCL's messages may be waited for any number of times
"""

from tests.cases.begin import dist, rank, t

work = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
work.wait()
if rank == 0:
    work.wait()  # <-
dist.barrier()
