# ranks: 2
"""A program that shows an exception as the interpreter would, and goes on, while another rank waits for it."""

import sys
import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)
threading.excepthook = lambda args: sys.excepthook(*args[:3])


def fails():
    raise OSError("no such shard")


if rank == 1:
    try:
        fails()
    except OSError:
        sys.excepthook(*sys.exc_info())
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    time.sleep(1)
dist.all_reduce(t)
dist.destroy_process_group()
