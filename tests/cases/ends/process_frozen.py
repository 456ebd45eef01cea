"""Rank 1's process is stopped by a signal.

ranks: 3
kind: process_frozen
culprits: 1
exit: 3
hang_after: 1.5
rule: Freeze 1
lines: no, py-spy has the faulty line; a rule strikes in the call after it
"""

import os
import signal
import sys

from tests.cases.begin import dist, rank, t

if rank == 1 and "simulated" not in sys.argv:
    os.kill(os.getpid(), signal.SIGSTOP)  # <-
dist.all_reduce(t)
