"""Rank 1 polls is_completed() of a receive, which on gloo only wait() completes.

ranks: 2
kind: host_stuck
culprits: 1
exit: 3
says: Call wait() on the handle of
hang_after: 3
gpus: no, NCCL's messages end by themselves
"""

from tests.cases.begin import dist, rank, t

work = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
if rank == 0:
    work.wait()
else:
    while not work.is_completed():  # <-
        pass
dist.barrier()
