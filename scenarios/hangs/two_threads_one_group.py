"""Teaches: two threads of a rank use one group. Which of them comes first is not the same on all ranks,
so their calls meet the wrong way round.
"""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
turn = threading.Event()


def log_metrics() -> None:
    turn.wait()
    dist.all_reduce(torch.ones(1))


thread = threading.Thread(target=log_metrics)
thread.start()
if rank == 1:  # here the logging thread happens to be first
    turn.set()
    thread.join()
dist.all_reduce(torch.ones(16))  # <- culprit
turn.set()
thread.join()
