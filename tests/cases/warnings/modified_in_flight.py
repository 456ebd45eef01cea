"""Rank 1 writes to a tensor while its all_reduce is on its way.

ranks: 2
kind: buffer_modified_in_flight
culprits: 1
exit: 4
checksum: 1
gpus: no, writes to a buffer on a GPU are not watched
"""

import time

from tests.cases.begin import dist, rank, torch

x = torch.ones(1 << 16)
work = dist.all_reduce(x, async_op=True)  # <-
if rank == 1:
    x += 1
time.sleep(0.1)
work.wait()
dist.barrier()
dist.destroy_process_group()
