"""Teaches: a rank that is only late. The others' group has a timeout of five seconds, in the simulation's
own time, and after it they get what torch raises: a RuntimeError at their line.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
if rank == 3:
    time.sleep(60)
dist.all_reduce(torch.ones(4))  # <- waits
