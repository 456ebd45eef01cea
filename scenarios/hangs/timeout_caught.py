"""Teaches: the same as timeout.py, but the program catches the timeout and ends well.

Nothing is wrong then, and no virtual minute costs a real one.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group(timeout=timedelta(seconds=5))
begin = time.monotonic()
if rank == 3:
    time.sleep(60)
else:
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        print(f"rank {rank}: {type(error).__name__} after {time.monotonic() - begin:.0f} s")
dist.barrier()
