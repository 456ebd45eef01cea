"""Teaches: a rank that waits for a lock of its own that nobody will release."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
lock = threading.Lock()
lock.acquire()
if rank == 2:
    lock.acquire()  # <- culprit
dist.all_reduce(torch.ones(4))  # <- waits
