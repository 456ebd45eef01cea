"""The timeout of a group's call is caught, and the job goes on without the group.

ranks: 3
kind: healthy
"""

import time
from datetime import timedelta

from tests.cases.begin import dist, rank, t

group = dist.new_group(timeout=timedelta(seconds=0.8))
if rank == 2:
    time.sleep(2)
else:
    try:
        dist.all_reduce(t, group=group)
    except RuntimeError as error:
        print(f"rank {rank}: {type(error).__name__}")
dist.barrier()
