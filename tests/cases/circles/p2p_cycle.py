"""Every rank receives from the next one before it sends to the one before.

ranks: 3
kind: deadlock_cycle
culprits: 0, 1, 2
exit: 3
"""

from tests.cases.begin import dist, rank, t, world

dist.recv(t, src=(rank + 1) % world)  # <-
dist.send(t, dst=(rank - 1) % world)
