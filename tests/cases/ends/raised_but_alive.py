"""Rank 1 raises, and a thread keeps its process alive.

ranks: 3
kind: rank_raised
culprits: 1
exit: 1
"""

import threading

from tests.cases.begin import dist, rank, t

threading.Thread(target=threading.Event().wait).start()  # a prefetching thread that nobody stops
for step in range(5):
    if rank == 1 and step == 3:
        raise ValueError("bad batch")  # <-
    dist.all_reduce(t)
