"""One rank comes three seconds late, once.

ranks: 2
kind: healthy
"""

import time

from tests.cases.begin import dist, rank, t

if rank == 1:
    time.sleep(3)
dist.all_reduce(t)
dist.barrier()
dist.destroy_process_group()
