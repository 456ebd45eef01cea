"""Rank 0 dies of a segmentation fault.

ranks: 3
kind: rank_killed
culprits: 0
exit: 3
rule: Crash 0 SIGSEGV
lines: no, faulthandler has the faulty line; a rule strikes in the call after it
"""

import ctypes
import sys

from tests.cases.begin import dist, rank, t

if rank == 0 and "simulated" not in sys.argv:
    ctypes.string_at(0)  # <-
dist.all_reduce(t)
