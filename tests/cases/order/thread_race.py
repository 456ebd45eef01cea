"""A thread and the main thread use one group, in an order that differs between ranks.

ranks: 2
kind: thread_race
culprits: 0
exit: 4
strict: no, what its exception says depends on which thread came first
gpus: no, a call on a GPU does not keep its thread inside
"""

import threading
import time

from tests.cases.begin import dist, rank, torch


def other():
    time.sleep(0.3 if rank else 0.1)
    dist.all_reduce(torch.ones(4))  # <-


thread = threading.Thread(target=other, name="metrics")
thread.start()
time.sleep(0.5 if rank else 0.02)
dist.broadcast(torch.ones(2), 0)
thread.join()
