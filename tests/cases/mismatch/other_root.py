"""Rank 1 takes another rank for the source.

ranks: 2, 4
kind: root_mismatch
culprits: 1
exit: 4
tie: 2
"""

from tests.cases.begin import FIXED, dist, rank, t

dist.broadcast(t, src=1 if rank == 1 and not FIXED else 0)  # <-
dist.barrier()
dist.destroy_process_group()
