"""A message and a barrier, in one order on both ranks.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, rank, t

if rank == 0:
    dist.send(t, 1)
    dist.barrier()
else:
    dist.recv(t, 0)
    dist.barrier()
dist.monitored_barrier()
dist.destroy_process_group()
