"""Every rank waits on its own host, for a queue that nobody fills.

ranks: 2
kind: host_stuck
culprits: 0, 1
exit: 3
hang_after: 3
suite: check
"""

import queue

from tests.cases.begin import dist, t

dist.all_reduce(t)
queue.Queue().get()  # <-
