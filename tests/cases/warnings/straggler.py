"""Rank 1 comes seconds late to the last step.

ranks: 3
kind: straggler
culprits: 1
exit: 0
straggler_after: 0.8
lines: no, the monitor says where it is while the others wait, the simulator where it came late
"""

import time

from tests.cases.begin import dist, rank, t

for step in range(4):
    if rank == 1:
        time.sleep(2.5 if step == 3 else 0.05)  # <- while the others wait
    dist.all_reduce(t)  # <- afterwards
dist.destroy_process_group()
