"""Teaches: a rank waits for a key of the store that nobody sets, within a timeout of hours."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.wait(["ready"], timedelta(hours=5))  # <- culprit
dist.all_reduce(torch.ones(4))  # <- waits
