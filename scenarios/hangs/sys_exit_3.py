"""Teaches: a rank ends with sys.exit(3) in the middle of the job."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
if rank == 1:
    sys.exit(3)  # <- culprit
dist.all_reduce(torch.ones(4))  # <- waits
