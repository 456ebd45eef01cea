"""Both ranks wait for an irecv before they send.

ranks: 2
kind: deadlock_cycle
culprits: 0, 1
exit: 3
"""

from tests.cases.begin import dist, rank, t

work = dist.irecv(t, src=1 - rank)  # <-
work.wait()
dist.send(t, 1 - rank)
