"""Teaches: os._exit leaves without a word: no cleanup, no traceback, no destroy_process_group."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
if rank == 2:
    os._exit(7)  # <- culprit
dist.all_reduce(torch.ones(4))  # <- waits
