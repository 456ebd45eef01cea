"""The others wait for an event that the callback of a call sets, which rank 1 never makes.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
"""

import threading

from tests.cases.begin import dist, rank, torch

reduced = threading.Event()
if rank != 1:
    dist.all_reduce(torch.ones(8), async_op=True).get_future().add_done_callback(lambda done: reduced.set())
    reduced.wait()
dist.barrier()  # <-
