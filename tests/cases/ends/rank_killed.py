"""Rank 2 is killed by a signal.

ranks: 3
kind: rank_killed
culprits: 2
exit: 3
suite: check, smoke
rule: Crash 2
lines: no, no stack is left: the real one is last seen in the call before
"""

import os
import signal
import sys

from tests.cases.begin import dist, rank, t

if rank == 2 and "simulated" not in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(t)
