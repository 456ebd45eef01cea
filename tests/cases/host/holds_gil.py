"""A regular expression on rank 1 keeps the GIL for ever.

ranks: 3
kind: host_stuck
culprits: 1
exit: 3
says: one call holds the GIL
hang_after: 1.5
simulated: no, simulated ranks are threads of one interpreter: who holds it stops the simulator, watchdog and all
"""

import re

from tests.cases.begin import dist, rank, t

if rank == 1:
    re.match(r"(a+)+$", "a" * 40 + "b")  # <-
dist.all_reduce(t)
