"""Teaches: torch's own tool. A monitored_barrier has a timeout and rank 0 names who did not come; the
others get an error too.
"""

from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank != 2:
    dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=True)  # <- waits
